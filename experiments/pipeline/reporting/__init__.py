"""What the parts of a pipeline did, as figures, curves and a page."""
