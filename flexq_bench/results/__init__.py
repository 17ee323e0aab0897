"""Stored results: levels, comparisons, noise, the scoreboard, and series of static metrics."""
