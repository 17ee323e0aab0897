"""Where `flexq-bench` and `python -m flexq_bench` start: Ctrl-C is heard before all is imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from flexq_bench.exit_codes import INTERRUPTED


def main() -> int:
    """Run this process's command line and return its exit code."""
    # Importing takes a second, and an exception in the middle of it may end up anywhere.
    signal.signal(signal.SIGINT, _leave)
    from flexq_bench.cli.app import main as run
    from flexq_bench.interrupts import hear_interrupts

    hear_interrupts()
    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
