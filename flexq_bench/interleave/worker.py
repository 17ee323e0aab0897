"""A worker process: measures with the code of the tree that it was started in, when asked to.

    python -m flexq_bench.interleave.worker --device cuda --seed 0

Requests come on stdin, replies go to stdout (see messages.py); all else goes to stderr. It ends
when stdin does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from flexq_bench.errors import FlexqError
from flexq_bench.interleave.messages import decode, encode
from flexq_bench.interleave.stand import Stand
from flexq_bench.measure import Meter
from kernels.errors import UnknownKernelError, UnsupportedError
from workloads.errors import WorkloadError

_OPERATIONS = (
    *("describe", "memory", "prepare", "place", "turn", "leave", "release"),
    *("fill", "output"),  # for a gate, which judges results by inputs of its own
)
_REFUSALS = (FlexqError, UnsupportedError, UnknownKernelError, WorkloadError)


def serve(
    stand: object,
    requests: BinaryIO,
    replies: BinaryIO,
    operations: tuple[str, ...] = _OPERATIONS,
) -> None:
    """Answer requests, each a call of one of the stand's operations, until there are no more."""
    for line in requests:
        message = decode(line)
        answer = _answer(stand, message, operations)
        replies.write(encode({"id": message["id"], **answer}))
        replies.flush()


def _answer(stand: object, message: dict[str, Any], operations: tuple[str, ...]) -> dict[str, Any]:
    arguments = {key: value for key, value in message.items() if key not in ("id", "do")}
    name = message["do"]
    if name not in operations:
        return {"error": f"this commit can't {name!r}", "refused": False}
    operation: Callable[..., dict[str, Any]] = getattr(stand, name)
    try:
        return {"reply": operation(**arguments)}
    except _REFUSALS as error:
        return {"error": _one_line(error), "refused": True}
    except Exception as error:  # a kernel may raise anything; who asked decides what it means
        return {"error": f"{type(error).__name__}: {_one_line(error)}", "refused": False}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def own_stdout() -> BinaryIO:
    """Stdout for replies alone: what a library prints goes to stderr from now on."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    replies = own_stdout()
    meter = Meter(options.device, seed=options.seed)
    with meter.device_guard():
        serve(Stand(meter), sys.stdin.buffer, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
