"""The git repository of the code: revisions, worktrees, provenance of measured code."""
