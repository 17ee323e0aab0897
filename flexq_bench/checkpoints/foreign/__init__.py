"""Checkpoints that others made: llm-compressor, AutoAWQ and GPTQ, as layers of ours.

Codes and scales are taken as they are stored; nothing is rounded again. What they stand for is the
maker's own dequantization, computed without rounding.
"""
