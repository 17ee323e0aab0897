"""Sweeps: kernels on shapes chosen by the user, from texts, and their plots."""
