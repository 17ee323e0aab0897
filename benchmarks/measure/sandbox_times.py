"""Times of the same kernels outside and inside a sandbox, and what a sandbox costs at the start.

    python benchmarks/measure/sandbox_times.py --processes 16 --blocks 6 \\
        "flexq-imma-w6a6 gemm cold m4n4096k4096"
    python benchmarks/measure/sandbox_times.py --device cpu "torch-fp16 gemm hot m4n256k256"

Both sides run this program by the engine of comparisons, forked from servers: base outside, head in
the first kind of sandbox that works here, or the one that FLEXQ_BENCH_SANDBOX names. Prints the
change of the times in the sandbox with its one-sided 99 % bounds, and the blocks that do not count
because the clock was too low; then the median seconds from the request of a process to its first
reply and to its first timed sample, and those of the first process of a server.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from process_starts import TREE, Start, start

from flexq_bench.measure.ab.blocks import Block, CaseSide
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Side
from flexq_bench.measure.ab.rules import InterleaveRules
from flexq_bench.measure.external_kernels import sandbox_of
from flexq_bench.measure.launcher import Launcher, forking_launcher
from flexq_bench.measure.sandbox import Sandbox, available_kind
from flexq_bench.workloads.case import Case

Wrap = Callable[[Sequence[str]], Sequence[str]]


def ratio(case: Case, wraps: dict[str, Wrap], device: str, processes: int, blocks: int) -> str:
    """A line with the change of a case's time."""
    lost: list[Block] = []

    def note(_: Case, block: Block) -> None:
        if math.isnan(block.base_us) or math.isnan(block.head_us):
            lost.append(block)

    with ExitStack() as stack:
        sides = [
            Side(name, TREE, launcher=stack.enter_context(forking_launcher(TREE, wrap)))
            for name, wrap in wraps.items()
        ]
        rules = InterleaveRules(processes=processes, blocks=blocks, looks=1)
        # Every stage is measured to the end.
        rules = replace(rules, suffices=lambda *_: False)
        experiment = ABExperiment(
            sides[0], sides[1], rules=rules, device=device, starts_ahead=False, on_block=note
        )
        (result,) = compare_cases([(experiment, [(case, case)])])
    found = result.confirmation
    low, change, high = (
        100 * math.expm1(value) for value in (found.low, found.log_ratio, found.high)
    )
    return (
        f"{case.key}: {change:+.3f} % ({low:+.3f} to {high:+.3f}), {found.placements} pairs of "
        f"processes, {found.blocks} blocks, {len(lost)} without a time"
        + (f": {result.detail}" if result.detail else "")
    )


def starts(case: Case, kind: str, launcher: Launcher, device: str, count: int) -> list[Start]:
    """The first process of a server, and so many others."""
    side = CaseSide("base", case, config={})
    return [start(kind, launcher, 0, device).measured(side, 1) for _ in range(count + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=16, help="pairs of them")
    parser.add_argument("--blocks", type=int, default=6, help="ABBA blocks of a pair")
    parser.add_argument("--starts", type=int, default=5, help="timed starts of each kind")
    options = parser.parse_args()
    kind = available_kind()
    if kind == "none":
        sys.exit("this machine allows no sandbox: see flexq-bench doctor")
    sandbox: Sandbox = replace(sandbox_of([], None, [TREE]), kind=kind)
    wraps: dict[str, Wrap] = {"outside": tuple, kind: sandbox.wrap}
    cases = [Case.from_key(key) for key in options.cases]
    for case in cases:
        line = ratio(case, wraps, options.device, options.processes, options.blocks)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    for name, wrap in wraps.items():
        with forking_launcher(TREE, wrap) as launcher:
            first, *others = starts(cases[0], name, launcher, options.device, options.starts)
        reply, sample = (
            statistics.median(values)
            for values in zip(*((s.reply_s, s.sample_s) for s in others), strict=True)
        )
        sys.stdout.write(
            f"{name}: first reply after {reply:.3f} s, first sample after {sample:.3f} s; of a new "
            f"server {first.reply_s:.2f} and {first.sample_s:.2f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
