"""Which layers of a model suffer most from quantization, and which of them should get more bits."""
