"""Leaderboard: the kernels of one shape, the fastest first."""
