"""Pareto: perplexity increase of a model's checkpoints over time per token and memory."""
