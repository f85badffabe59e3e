"""What an entry costs: coding it, and how few bits it could take."""
