"""The git repository that code comes from: revisions, worktrees, provenance of measured code."""
