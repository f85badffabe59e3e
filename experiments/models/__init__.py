"""What is trained, and what it starts from."""
