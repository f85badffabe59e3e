"""Where versions are kept, and how they are fetched: folders, object stores, and a small HTTP server."""
