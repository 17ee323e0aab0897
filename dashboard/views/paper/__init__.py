"""Paper: published numbers next to measured ones, in separate columns."""
