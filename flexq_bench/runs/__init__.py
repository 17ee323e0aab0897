"""Runs: plan cases, measure them, store their records, resume, and compare stored results."""
