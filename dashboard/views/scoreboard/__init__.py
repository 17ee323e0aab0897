"""Scoreboard: each kernel on each GPU, against last week and the last release."""
