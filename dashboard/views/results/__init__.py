"""Results: every result of a run beside a baseline and the floor."""
