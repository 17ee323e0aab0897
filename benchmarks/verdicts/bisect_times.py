"""Wall time of `bisect` over a history with one slower commit.

    python benchmarks/verdicts/bisect_times.py                                   # torch, on a CPU
    python benchmarks/verdicts/bisect_times.py --kernel triton --commits 64 --percent 15

The sample repository's W6A8 kernel gets commits that change a comment; one of them, drawn from the
seed, is slower as well. Prints the command's output, the seconds, and whether the commit was named.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from gate_times import PHASES, PROGRAM, SHAPES, changed, git, make_repository, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="torch", choices=list(SHAPES))
    parser.add_argument("--shape", help="N x K")
    parser.add_argument("--commits", type=int, default=64)
    parser.add_argument("--percent", default="15")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", action="store_true", help="print where its time was spent")
    given, more = parser.parse_known_args()
    culprit = random.Random(given.seed).randrange(1, given.commits + 1)
    given.m, given.limit, given.heads = "16", 2.0, ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "acme"
        make_repository(folder, given)
        git(folder, "checkout", "--quiet", "-B", "history")
        path = folder / "kernels" / f"{given.kernel}_kernels.py"
        for number in range(1, given.commits + 1):
            text = f"{path.read_text()}# Change {number}.\n"
            path.write_text(
                changed(text, f"slower-{given.percent}", given.kernel)
                if number == culprit
                else text
            )
            git(folder, "commit", "--quiet", "--all", "--message", f"change {number}")
        case = f"acme.{given.kernel}-w6a8 gemm cold m16n{shape(given).replace('x', 'k')}"
        revisions = ("--good", "base", "--bad", "HEAD")
        program = PHASES if given.phases else PROGRAM
        ran, took = timed(
            "bisect", case, "--project", str(folder), *revisions, *more, program=program
        )
    sys.stdout.write(ran.stdout + ran.stderr[-4000:])
    named = ran.stdout.rstrip().endswith(f"change {culprit}")
    sys.stdout.write(
        f"{given.commits} commits, {took:.1f} s, exit {ran.returncode}, change {culprit} "
        f"{'named' if named else 'not named'}\n"
    )
    sys.exit(int(not named))


def shape(given: argparse.Namespace) -> str:
    return str(given.shape or SHAPES[given.kernel])


if __name__ == "__main__":
    main()
