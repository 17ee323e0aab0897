"""Handlers of SIGINT and SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SOON_S = 0.02
_received = False


def handle_interrupts() -> None:
    """Make SIGINT raise KeyboardInterrupt, also in finalizers, where Python only prints it."""

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is KeyboardInterrupt:  # raised in a finalizer, which can't end anything
            again = threading.Timer(_SOON_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            sys.__unraisablehook__(ignored)

    sys.unraisablehook = raise_again
    signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Return True if SIGINT was received, even if it surfaced as another error, as in imports."""
    return _received


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """Let SIGTERM (from a job scheduler or a service manager) end the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt
