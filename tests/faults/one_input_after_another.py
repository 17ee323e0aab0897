"""Run command lines that come as JSON on stdin, one a line, in this process; say how each ended.

An input that takes longer than the seconds given is stopped, and said to hang.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from types import FrameType


class Hang(BaseException):
    """A command that hangs; no Exception, so that no handler of errors catches it."""


def stop(_number: int, _frame: FrameType | None) -> None:
    raise Hang


def main(longest_s: int) -> None:
    from flexq_bench.cli.app import main as run

    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    signal.signal(signal.SIGALRM, stop)
    for line in sys.stdin:
        arguments = json.loads(line)
        out, err = io.StringIO(), io.StringIO()
        began, code, ended = time.monotonic(), None, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                signal.alarm(longest_s)
                code = run(arguments)
            except Hang:
                ended = "hang: " + "".join(traceback.format_exc(limit=-6))
            except BaseException:
                ended = traceback.format_exc()
            finally:
                signal.alarm(0)
        answer = {
            "code": code,
            "ended": ended,
            "out": out.getvalue()[-2000:],
            "err": err.getvalue()[-4000:],
            "took_s": time.monotonic() - began,
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
