"""Sweep: request a sweep, follow its progress, see its curves."""
