"""Being told to stop: by Ctrl-C wherever it is heard, and by a scheduler as by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SOON_S = 0.02
_heard = False


def hear_interrupts() -> None:
    """From now on SIGINT raises KeyboardInterrupt, also where Python would print and forget it."""

    def unheard(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is KeyboardInterrupt:  # raised in a finalizer, which can't end anything
            again = threading.Timer(_SOON_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            sys.__unraisablehook__(ignored)

    sys.unraisablehook = unheard
    signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Whether SIGINT came: what raised it may have been told as another error, as imports do."""
    return _heard


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """SIGTERM (a job scheduler's time limit, a service manager) ends the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _heard
    _heard = True
    raise KeyboardInterrupt
