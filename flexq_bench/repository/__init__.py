"""Git repositories of the measured code: revisions, worktrees, builds, provenance."""
