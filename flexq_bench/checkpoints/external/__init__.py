"""Checkpoints of other tools (llm-compressor, AutoAWQ, GPTQ), read as our layers.

Codes and scales are used as stored; nothing is rounded again. Their values are those of the tool's
own dequantization, computed without rounding.
"""
