"""Ctrl-C (SIGINT) and SIGTERM, from the signal to the exit code.

1. While the program is being imported, Ctrl-C ends it at once with exit code 130 (`exit_at_once`,
   set by `flexq_bench/__main__.py`): code that is being imported may swallow a KeyboardInterrupt.
2. Afterwards Ctrl-C raises KeyboardInterrupt in the main thread (`handle_interrupts`).
3. SIGTERM, sent by job schedulers and service managers, and SIGHUP, sent when a terminal closes, do
   the same while something is measured or evaluated (`ended_by_terminate`).
4. `runs.lifecycle.open_run` sets the status of a run to interrupted; stored results stay. Other
   context managers stop processes that were started, and remove temporary files.
5. A command that can be resumed prints how (`cli.output.say_interrupted`).
6. `cli.app.main` returns exit code 130 (`exit_codes.INTERRUPTED`) for a KeyboardInterrupt, and for
   any unexpected error after a Ctrl-C (`was_interrupted`), as libraries turn a KeyboardInterrupt
   into errors of their own. Servers (`dashboard`, `serve-api`) return 0: Ctrl-C is how they end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flexq_bench.exit_codes import INTERRUPTED

_FINALIZER_DELAY_S = 0.05  # longer than the hook of a busy process
_received = False


def exit_at_once() -> None:
    """Make SIGINT end the process without cleaning up."""
    signal.signal(signal.SIGINT, _exit)


def handle_interrupts() -> None:
    """Make SIGINT raise KeyboardInterrupt, also in finalizers, where Python only prints it."""

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is KeyboardInterrupt:  # raised in a finalizer, which can't end anything
            signal.setitimer(signal.ITIMER_REAL, _FINALIZER_DELAY_S)
        else:
            sys.__unraisablehook__(ignored)

    sys.unraisablehook = raise_again
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)  # of the timer


def was_interrupted() -> bool:
    """Return True if SIGINT was received, even if it surfaced as another error."""
    return _received


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, unless ignored (`nohup`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
