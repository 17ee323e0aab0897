"""Definitions of operations, one per file, found by `flexq_bench.workloads.operation`."""
