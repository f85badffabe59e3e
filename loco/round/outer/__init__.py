"""What a rank holds of the outer optimization."""
