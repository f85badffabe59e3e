"""What the frameworks' trainers have in common."""
