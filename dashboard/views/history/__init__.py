"""History: series over commits, and their patterns."""
