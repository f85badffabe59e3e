"""What a version is: its layout, manifest and files, and which of them lead to it."""
