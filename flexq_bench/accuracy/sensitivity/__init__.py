"""Sensitivity of a model's layers to quantization, and a budget of 8-bit activations.

`kind_sensitivities` measures the perplexity with one kind of layer quantized at a time.
`try_budget` chooses the layers that gain most from more bits
(`flexq_bench.schemes.layer_sensitivity`) and evaluates the choice. `write_figure` draws both.
"""
