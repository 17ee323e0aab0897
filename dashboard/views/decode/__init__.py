"""Decode: latency, throughput and memory of whole models, and serving."""
