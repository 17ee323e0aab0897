"""Measurement: one result with its raw samples and the state of its device."""
