"""Scoreboard: each kernel on each GPU, compared with last week and the last release."""
