"""Expected verdicts of the accuracy gate, and the time of each.

    python benchmarks/accuracy/gate_verdicts.py --model DIR --data NAME=FILE --policy FILE

Runs `flexq-bench gate accuracy` three times in separate processes: on the policy's schemes, which
should pass; on w4a4, four bits rounded to nearest, which should fail; and on the policy's schemes
in a build whose packer flips the sign of one group's scale, which should fail too. Exit code 1: a
verdict differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flexq_bench.accuracy.setup import best_device
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.cli.app import main as flexq_bench
from flexq_bench.kernels.contract import Backend, LinearKernel, PackedOperand
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.registry import resolve
from flexq_bench.schemes import registry as schemes

BROKEN = "--broken"
PASSED, FAILED = 0, 1
Pack = Callable[[LinearKernel, Operand], PackedOperand]


def main() -> int:
    """Run the three; in a child process, the third."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--data", "--policy"):
        parser.add_argument(name, required=True)
    parser.add_argument("--device", default=best_device())
    parser.add_argument(BROKEN, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gate = ["gate", "accuracy"]
    for name in ("model", "data", "policy", "device"):
        gate += [f"--{name}", getattr(options, name)]
    if options.broken:
        break_packing(options.policy, options.device)
        return flexq_bench(gate)
    plain = [sys.executable, "-m", "flexq_bench.cli", *gate]
    again = [sys.executable, *sys.argv, BROKEN]
    right = [
        verdict("the policy's schemes", plain, PASSED),
        verdict("w4a4", [*plain, "--scheme", "w4a4"], FAILED),
        verdict("one group's scale with its sign flipped", again, FAILED),
    ]
    return PASSED if all(right) else FAILED


def verdict(what: str, command: Sequence[str], expected: int) -> bool:
    """Run a gate, print what it said, how it ended and how long it took."""
    started = time.monotonic()
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    sys.stdout.write(f"{ended.stdout}{what}: exit code {ended.returncode}, {seconds:.0f} s\n")
    sys.stdout.flush()
    return ended.returncode == expected


def break_packing(policy: str, device: str) -> None:
    """Patch the kernels of the policy's schemes to pack one group with the wrong sign."""
    backend: Backend = "cpu" if device == "cpu" else "cuda"
    judged = map(schemes.resolve, load_accuracy_policy(policy).schemes)
    layers = [found for scheme in judged for found in schemes.layer_kernels(scheme, gated=True)]
    classes: set[Any] = {type(resolve(found.kernel, backend)) for found in layers if found.kernel}
    for kernel in classes:
        kernel.pack_weight = flipping(kernel.pack_weight)


def flipping(pack: Pack) -> Pack:
    """Pack weights as `pack` does, after one group's scale has changed its sign."""

    def packing(kernel: LinearKernel, weight: Operand) -> PackedOperand:
        assert weight.scales is not None
        scales = weight.scales.clone()
        scales[0, 0] = -scales[0, 0]
        return pack(kernel, replace(weight, scales=scales))

    return packing


if __name__ == "__main__":
    sys.exit(main())
