"""Accuracy: perplexity and tasks by model and scheme, and the history of accuracy gates."""
