"""The side of a pipeline that samples: workers and their engines."""
