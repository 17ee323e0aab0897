"""One file a revision. There is no way down: export, and import into the older version."""
