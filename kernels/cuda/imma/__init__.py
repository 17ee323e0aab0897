"""Kernels on int8 tensor cores (csrc/imma): flexq-imma, group-w4a8, dgq-w4a8, dual-w6a8, atom-w4a4.

gemm.py: launcher. configurations.py: compile-time and launch parameters. configuration_choice.py:
choice of a configuration.
"""
