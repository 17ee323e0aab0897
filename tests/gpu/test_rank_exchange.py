"""Sums of short vectors by one launch (csrc/ranks/exchange.cu) on all GPUs of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexq_bench.kernels.runtime.ranks import MAX_EXCHANGE_RANKS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_exchange_equals_sums_and_maxima_of_all_ranks(tmp_path: Path) -> None:
    count = min(torch.cuda.device_count(), MAX_EXCHANGE_RANKS)
    script = Path(__file__).with_name("rank_sums.py")
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(count), str(tmp_path / "meeting")])
        for rank in range(count)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
