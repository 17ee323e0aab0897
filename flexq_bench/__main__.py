"""Entry point of `flexq-bench` and `python -m flexq_bench`: handles Ctrl-C during imports too."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from flexq_bench.exit_codes import ExitCode
from flexq_bench.interrupts import exit_at_once, handle_interrupts
from flexq_bench.packages import Missing, explain_missing, install_command, missing_packages


def main() -> int:
    """Run this process's command line and return its exit code."""
    exit_at_once()  # on Ctrl-C during the imports, which take a second
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if verb == "doctor" and (missing := missing_packages()):
        return _report_missing(missing, as_json="--json" in sys.argv)
    try:
        from flexq_bench.cli.app import main as run
    except ModuleNotFoundError as error:
        message = explain_missing(error)
        if message is None:
            raise
        sys.stderr.write(f"flexq-bench: {message} (flexq-bench doctor tells more)\n")
        return ExitCode.INFRASTRUCTURE
    handle_interrupts()
    code = run()
    if "torch" in sys.modules:
        _end(code)
    gc.freeze()  # else Python searches all that was imported for garbage as it ends: .1 s and more
    return code


def _end(code: int) -> NoReturn:
    """End this process without the cleanup of modules and devices, which takes up to a second."""
    atexit._run_exitfuncs()  # of temporary folders, sockets and the like
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # said before, or closed
            stream.flush()
    os._exit(code)


def _report_missing(missing: Sequence[Missing], *, as_json: bool) -> int:
    """Print the output of `doctor` if required packages are missing, which other checks import."""
    if as_json:
        checks = [
            {
                "name": package.name,
                "state": "broken",
                "detail": f"not installed; {package.needed_by} needs it",
                "advice": install_command([package]),
            }
            for package in missing
        ]
        sys.stdout.write(json.dumps(checks, indent=2) + "\n")
    else:
        for package in missing:
            sys.stdout.write(f"{package.name}: not installed; {package.needed_by} needs it\n")
        sys.stdout.write(f"-> {install_command(missing)}\n")
    return ExitCode.INFRASTRUCTURE


if __name__ == "__main__":
    sys.exit(main())
