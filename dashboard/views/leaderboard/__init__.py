"""Leaderboard: kernels on one shape, fastest first."""
