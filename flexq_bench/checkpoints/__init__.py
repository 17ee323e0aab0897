"""Quantized checkpoints: what schemes write, and what accuracy, decode and the gate read."""
