"""Kernels: number formats, CUDA sources, launchers, references and the registry.

Hugging Face publishes a package of the same name, which `transformers` detects by its version;
this package therefore defines no version.
"""
