"""History: series over commits, and what pattern each of them shows."""
