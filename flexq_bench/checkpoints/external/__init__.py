"""Checkpoints of other tools, read as our layers, a module for each layout.

Codes and scales are used as stored; nothing is rounded again. Their values are those of the tool's
own dequantization.
"""
