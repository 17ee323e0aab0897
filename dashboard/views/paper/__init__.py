"""Paper: published tables and statements beside ours, each with a verdict."""
