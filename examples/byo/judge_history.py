"""Hold what the service says of the sample's commits against what was seeded in them.

    python examples/byo/make_repository.py FOLDER
    python examples/byo/judge_history.py FOLDER --db FILE [--nights 1:30] [--gates] [--bisect]

Each commit has its night (`nightly --project`), oldest first. --gates: `gate perf` and `gate
static` of each seeded commit, and of one with no change, against the one before it; `--gates
slower,slower~3`: of these. --bisect: a search for the commit that made each kernel slower, from ten
commits before; `--bisect triton-w6a8`: of this one. A line for each command says how long it took
and what it ended with; exit code 1: one ended otherwise than it should, or alerts name other
commits. Started again with the same --db and later --nights it goes on. Options that are not this
script's (`--processes 2`) go to `gate perf` and `bisect`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# By tag the exit codes of a night, of a gate and of a static one. 5: it does not build.
SEEDED = {
    "slower": (1, 1, 0),
    "fast-again": (0, 0, 0),
    "wrong-result": (1, 1, 0),
    "right-again": (0, 0, 0),
    "build-break": (5, 5, 5),
    "builds-again": (0, 5, 5),  # a gate's base must build, too
    "slightly-slower": (1, 1, 0),
}
SLOWER = ("slower", "slightly-slower")
# And a commit with no change to any kernel.
GATED = {**SEEDED, "slower~3": (0, 0, 0)}


class Judge:
    """The service's commands, run over one repository."""

    def __init__(self, folder: Path, db: Path, more: list[str]) -> None:
        self.folder, self.more = folder, more
        self.environment = {**os.environ, "FLEXQ_BENCH_DB": str(db)}
        self.mismatches = 0

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The service, with everything that it prints."""
        return subprocess.run(
            [sys.executable, "-m", "flexq_bench", *words],
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def expect(self, code: int, name: str, *words: str) -> str:
        """Run a command over the repository and say how it ended; its output."""
        start = time.monotonic()
        done = self.command(*words, "--project", str(self.folder))
        if done.returncode != code:
            self.mismatches += 1
            sys.stdout.write(f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}\n")
        self.say(name, f"exit {done.returncode}, expected {code}", time.monotonic() - start)
        return done.stdout

    def say(self, name: str, what: str, seconds: float = 0) -> None:
        """A line of the table."""
        sys.stdout.write(f"{name:<34} {what:<20} {seconds:6.1f} s\n")
        sys.stdout.flush()

    def git(self, *words: str) -> str:
        """Run a git command in the repository and return its output."""
        command = ["git", "-C", str(self.folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def nights(self, numbers: range) -> None:
        """A night for each of these commits, counted from 1."""
        commits = self.git("rev-list", "--reverse", "main").splitlines()
        tags = {self.git("rev-parse", tag): tag for tag in SEEDED}
        for number in numbers:
            commit = commits[number - 1]
            self.git("checkout", "--quiet", commit)
            tag = tags.get(commit, "")
            code = SEEDED[tag][0] if tag else 0
            night = f"2026-01-{number:02}"
            self.expect(code, f"night {number} {tag}", "nightly", "--night", night)
        self.git("checkout", "--quiet", "main")
        runs = json.loads(self.command("list", "runs", "--limit", "1000", "--json").stdout)
        # Also the nights of earlier calls, whose alerts are stored too.
        measured = {run["commit"] for run in runs if run["trigger"] == "nightly"}
        found = json.loads(self.command("alerts", "list", "--state", "all", "--json").stdout)
        named = {tags.get(alert["bad"]["sha"], alert["bad"]["sha"]) for alert in found}
        expected = {tags[commit] for commit in measured if tags.get(commit) in SLOWER}
        self.mismatches += named != expected
        self.say("alerts", f"{sorted(named)}, expected {sorted(expected)}")

    def gates(self, tags: Iterable[str]) -> None:
        """Commits of these tags, each against the commit before it."""
        for tag in tags:
            _, perf, static = GATED[tag]
            commits = ("--base", f"{tag}~1", "--head", tag)
            self.expect(perf, f"gate perf {tag}", "gate", "perf", *commits, *self.more)
            if (self.folder / "kernels" / "nvrtc_kernels.py").exists():  # tells of machine code
                self.expect(static, f"gate static {tag}", "gate", "static", *commits)

    def labels(self) -> list[str]:
        """Return the labels of the repository's kernels, without its prefix."""
        listed = self.git("grep", "-hoE", '"[a-z]+-w[0-9]+a[0-9]+"', "main", "--", "kernels")
        return list(dict.fromkeys(listed.replace('"', "").split()))

    def bisect(self, labels: Iterable[str]) -> None:
        """A search over ten commits for what made each of these kernels slower."""
        suite = (self.folder / "bench" / "suite.toml").read_text()
        n, k = re.search(r'shapes = \["(\d+)x(\d+)"\]', suite).groups()
        for label in labels:
            case = f"acme.{label} gemm cold m16n{n}k{k}"
            search = ("bisect", case, "--good", "slower~10", "--bad", "fast-again~1", "--json")
            out = self.expect(1, f"bisect {label}", *search, *self.more)
            named = json.loads(out)["suspects"] if out else []
            self.mismatches += named != [self.git("rev-parse", "slower")]
            self.say(f"bisect {label}", f"names {named}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--nights", default="1:30", help="FIRST:LAST; empty: none.")
    parser.add_argument("--gates", nargs="?", default="", const=",".join(GATED), help="Tags.")
    parser.add_argument("--bisect", nargs="?", const="all", help="Labels of kernels.")
    options, more = parser.parse_known_args()  # the rest goes to commands that compare
    judge = Judge(options.folder, options.db, more)
    if options.nights:
        first, last = (int(number) for number in options.nights.split(":"))
        judge.nights(range(first, last + 1))
    if options.gates:
        judge.gates(options.gates.split(","))
    if options.bisect:
        judge.bisect(judge.labels() if options.bisect == "all" else options.bisect.split(","))
    return judge.mismatches > 0


if __name__ == "__main__":
    sys.exit(main())
