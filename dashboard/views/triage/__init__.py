"""Triage: every alert, whether it is still slow, and who is on it."""
