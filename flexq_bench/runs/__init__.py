"""Runs: plan cases, execute them, record each result, resume, and compare what was stored."""
