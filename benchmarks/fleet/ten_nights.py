"""Nights of a project with two kernels on a CPU, by the command that people use: seconds of each.

    python benchmarks/fleet/ten_nights.py [--nights 10] [--shape 256x256] [--seconds 60]

The sample repository is made anew; night 1 is at its commit 6, so that night 6 has the seeded
slow-down by 10 % and night 10 the commit that takes it back. Exit code 1: a night took longer than
--seconds, or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from flexq_bench.repository.provenance import ROOT

SCRIPT = ROOT / "examples" / "byo" / "make_repository.py"
FIRST = 6  # commit of the first night


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--shape", default="256x256")
    parser.add_argument("--percent", default=(10, 3), nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--canaries", type=int, default=2)
    options = parser.parse_args()
    out, is_bad = sys.stdout.write, False
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    out("| night | commit | seconds | CPU s | exit | compared | verdicts | opened | fixed |\n")
    out("| ---: | --- | ---: | ---: | ---: | ---: | --- | --- | --- |\n")
    with TemporaryDirectory(prefix="fqb-nights-") as folder:
        acme, database = Path(folder) / "acme", str(Path(folder) / "nights.sqlite")
        percent = [str(value) for value in options.percent]
        made = ["--kernels", "torch", "--shape", options.shape, "--percent", *percent]
        subprocess.run([sys.executable, str(SCRIPT), str(acme), *made], check=True)
        git = ["git", "-C", str(acme)]
        listed = subprocess.check_output([*git, "rev-list", "--reverse", "HEAD"], text=True)
        for night, commit in enumerate(listed.split()[FIRST - 1 :][: options.nights], 1):
            subprocess.run([*git, "checkout", "--quiet", commit], check=True)
            named = subprocess.check_output([*git, "log", "-1", "--format=%s"], text=True).strip()
            began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "flexq_bench.cli", "nightly", "--project", str(acme)),
                    *("--night", f"2026-03-{night:02}", "--canaries", str(options.canaries)),
                    *("--device", "cpu", "--json", "--db", database),
                ],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.monotonic() - began
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            reports = json.loads(done.stdout) if done.stdout.startswith("[") else [{}]
            [report] = reports
            row = (report.get("comparisons", "-"), report.get("verdicts", done.stderr[-300:]))
            alerts = (list(report.get(name, ())) for name in ("opened", "fixed"))
            cells = (night, named, f"{seconds:.1f}", f"{cpu:.0f}", done.returncode, *row, *alerts)
            out(f"| {' | '.join(map(str, cells))} |\n")
            sys.stdout.flush()
            is_bad |= seconds > options.seconds or done.returncode not in (0, 1)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
