"""Share of `gate perf` runs that pass a commit without changes of the code.

    python benchmarks/verdicts/honest_gate.py --times 20       # one small shape on a CPU
    python benchmarks/verdicts/honest_gate.py --times 20 --policy default --device cuda

Head is base with an additional comment in `kernels`. Prints a line for each gate, then the number
of gates by exit code; 0 is a pass. Exit code 1: a gate reported a regression.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from flexq_bench.exit_codes import ExitCode
from flexq_bench.repository.provenance import ROOT

SUITE = """description = "one small shape"
[[group]]
kernels = ["cublas-fp16"]
m = "4"
shapes = ["256x256"]
caches = ["hot"]
"""
# Two processes of one CPU differ by several percent: a smaller limit leaves the gate undecided.
POLICY = 'version = 1\nsuite = "small.toml"\nslower_percent = 15\n'
CHANGED = "kernels/registry.py"


def honest_head(folder: Path) -> Path:
    """A clone of this repository whose HEAD changes a comment; base is HEAD~1."""
    tree = folder / "tree"
    git = ("git", "-C", str(tree), "-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tree)], check=True)
    file = tree / CHANGED
    file.write_text(file.read_text() + "# Nothing changed.\n")
    subprocess.run([*git, "commit", "--quiet", "--all", "--message", "Change nothing"], check=True)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--policy", help="default: one small shape, at most 15 % slower")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    codes: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = honest_head(folder)
        (folder / "small.toml").write_text(SUITE)
        (folder / "policy.toml").write_text(POLICY)
        for number in range(given.times):
            began = time.monotonic()
            ran = subprocess.run(
                [
                    *(sys.executable, "-m", "flexq_bench", "gate", "perf"),
                    *("--base", "HEAD~1", "--head", "HEAD", "--seed", str(number)),
                    *("--policy", given.policy or str(folder / "policy.toml")),
                    *("--processes", str(given.processes), "--device", given.device),
                    *("--db", str(folder / "gates.sqlite")),
                ],
                cwd=tree,
                capture_output=True,
                text=True,
            )
            codes[ran.returncode] += 1
            last = (ran.stdout.strip() or ran.stderr.strip()).splitlines()[-1:]
            took = time.monotonic() - began
            sys.stdout.write(f"{number}: exit {ran.returncode} after {took:.0f} s: {last}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(codes)}: {codes[ExitCode.PASS]} of {given.times} passed\n")
    sys.exit(int(codes[ExitCode.REGRESSION] > 0))


if __name__ == "__main__":
    main()
