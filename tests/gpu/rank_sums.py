"""A rank of test_rank_exchange.py: sums and maxima of random lengths against the library's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call
from flexq_bench.kernels.runtime.ranks import ProcessRanks

LENGTHS = (2, 6, 512, 514, 5120, 70_000, 131_072)


def main() -> None:
    """Arguments: rank, ranks, meeting. Exit code 1 and a line for a difference."""
    rank, count, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    ranks = ProcessRanks(device, rank, count, meeting)
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(len(LENGTHS), (400,), generator=torch.Generator().manual_seed(7))
    for turn, index in enumerate(lengths.tolist()):
        x = (torch.randn(LENGTHS[index], generator=generator) * 10).half().to(device)
        operation = ("add", "largest")[turn % 2]
        every = [torch.empty_like(x) for _ in range(count)]
        torch.distributed.all_gather(every, x)
        values = torch.stack(every).float()
        wanted = values.sum(0) if operation == "add" else values.amax(0)
        difference = getattr(ranks, operation)(x.clone()) != wanted.half()
        if difference.any():
            sys.exit(f"{operation} of {LENGTHS[index]}, turn {turn}: {int(difference.sum())} wrong")
    added = torch.zeros(5120, dtype=torch.float16, device=device)

    def chained() -> None:
        for _ in range(100):
            ranks.add(added)
            added.mul_(1 / count).add_(1)

    graph = captured_after_a_call(chained)
    added.zero_()
    for _ in range(20):
        graph.replay()
    if not (added == 2000).all():
        sys.exit(f"graphs: {added.min()} to {added.max()}")


if __name__ == "__main__":
    main()
