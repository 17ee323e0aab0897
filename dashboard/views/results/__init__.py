"""Results: all results of a run, relative to a baseline and the floor."""
