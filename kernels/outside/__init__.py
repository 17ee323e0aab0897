"""Kernels from outside of this repository: plain functions as kernels, files and packages of them.

What people import is `flexq_bench.api`. A source of kernels is a Python file, a module, or an
installed package that names the entry point group `flexq_bench.kernels`.
"""
