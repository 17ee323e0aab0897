"""Options of a process that is one of several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flexq_bench.kernels.runtime.ranks import ALONE, ProcessRanks, Ranks


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add what `RankProcesses` passes besides --device."""
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--meeting", type=Path)


def joined(options: argparse.Namespace, device: torch.device) -> Ranks:
    """Join the other ranks, whose processes are started too; waits for them."""
    if options.ranks == 1:
        return ALONE
    return ProcessRanks(device, options.rank, options.ranks, options.meeting)
