"""Pareto: a model's checkpoints as perplexity increase against time a token and memory."""
