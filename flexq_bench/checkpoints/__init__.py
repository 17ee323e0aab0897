"""Quantized checkpoints: the same bytes are evaluated, timed, gated and shipped.

`reader.open_checkpoint` reads a folder, `writer.CheckpointWriter` writes one, with one shard in
memory at a time. docs/checkpoints.md describes the format.
"""
