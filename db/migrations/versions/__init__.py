"""Revisions, one file each. No downgrades: export, and import into the older version."""
