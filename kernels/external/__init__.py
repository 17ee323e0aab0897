"""External kernels: plain functions as kernels, and files and packages of them.

Users import `flexq_bench.api`. A source of kernels is a Python file, a module, or an installed
package with an entry point in the group `flexq_bench.kernels`.
"""
