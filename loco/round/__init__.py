"""One round over some parameters among some members, and the state that it changes."""
