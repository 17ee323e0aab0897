"""Limits of a process that runs external kernels, so that excessive use ends only that process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from flexq_bench.measure.device import available_memory, find_device

_MAX_MEMORY_SHARE = 0.9  # of the free memory
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def limit_memory(device: str) -> None:
    """Make excessive allocations of host memory raise, and this process the first one to be killed.

    The limit is set only on a CPU, because CUDA reserves far more addresses than it uses.
    """
    with suppress(OSError):  # not Linux, or no permission
        _OOM_SCORE.write_text("1000")
    if device != "cpu":
        return
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = used + int(_MAX_MEMORY_SHARE * available_memory(find_device(device)))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
