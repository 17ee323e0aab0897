"""Paper: published numbers beside measured ones, each in columns of its own."""
