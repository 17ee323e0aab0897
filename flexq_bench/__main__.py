"""Entry point of `flexq-bench` and `python -m flexq_bench`: handles Ctrl-C during imports too."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.packages import Missing, explain_missing, install_command, missing_packages


def main() -> int:
    """Run this process's command line and return its exit code."""
    # Importing takes a second, and an exception in the middle of it may end up anywhere.
    signal.signal(signal.SIGINT, _leave)
    verb = next((one for one in sys.argv[1:] if not one.startswith("-")), "")
    if verb == "doctor" and (missing := missing_packages()):
        return _tell_missing(missing, as_json="--json" in sys.argv)
    try:
        from flexq_bench.cli.app import main as run
    except ModuleNotFoundError as error:
        told = explain_missing(error)
        if told is None:
            raise
        sys.stderr.write(f"flexq-bench: {told} (flexq-bench doctor tells more)\n")
        return ExitCode.INFRASTRUCTURE
    from flexq_bench.interrupts import handle_interrupts

    handle_interrupts()
    return run()


def _tell_missing(missing: Sequence[Missing], *, as_json: bool) -> int:
    """`doctor` where packages are missing, which its other checks may need."""
    if as_json:
        checks = [
            {
                "name": one.name,
                "state": "broken",
                "detail": f"not installed; {one.needed_by} needs it",
                "advice": install_command([one]),
            }
            for one in missing
        ]
        sys.stdout.write(json.dumps(checks, indent=2) + "\n")
    else:
        for one in missing:
            sys.stdout.write(f"{one.name}: not installed; {one.needed_by} needs it\n")
        sys.stdout.write(f"-> {install_command(missing)}\n")
    return ExitCode.INFRASTRUCTURE


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
