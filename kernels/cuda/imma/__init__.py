"""Kernels on int8 tensor cores (csrc/imma): flexq-imma, group-w4a8, dgq-w4a8, dual-w6a8, atom-w4a4.

gemm.py launches, configurations.py says how sources are compiled, configuration_choice.py chooses.
"""
