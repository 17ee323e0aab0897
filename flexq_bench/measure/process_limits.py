"""Limits of a process that runs kernels of others: what it takes too much of ends it, not us."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from flexq_bench.measure.device import available_memory, find_device

_SHARE = 0.9  # of the memory that is free
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def limit_memory(device: str) -> None:
    """An allocation of more host memory than there is raises, or ends this process first of all.

    A limit is set on a CPU only: CUDA reserves addresses far beyond what it uses.
    """
    with suppress(OSError):  # no Linux, or no such right
        _OOM_SCORE.write_text("1000")
    if device != "cpu":
        return
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = used + int(_SHARE * available_memory(find_device(device)))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
