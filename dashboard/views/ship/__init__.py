"""Ship: checkpoints of a model by time and memory, among those whose accuracy is acceptable."""
