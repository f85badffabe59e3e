"""What comes of runs: figures, tables, plots, a page."""
