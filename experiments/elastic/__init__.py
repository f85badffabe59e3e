"""Sites that come and go: one is killed, the others go on, it comes back."""
