"""Inside a worker process: answer requests on stdin by calls of an object's operations.

The other end is `flexq_bench.measure.worker_process`; the messages are those of
`flexq_bench.measure.worker_messages`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import Any, BinaryIO, NoReturn

from flexq_bench.errors import FlexqError, one_line
from flexq_bench.kernels.errors import SourceError, UnknownKernelError, UnsupportedError
from flexq_bench.measure.worker_messages import decode, encode
from flexq_bench.workloads.errors import WorkloadError

_MAX_ERROR_CHARS = 2000  # characters of an error
_REFUSALS = (FlexqError, SourceError, UnsupportedError, UnknownKernelError, WorkloadError)


def serve(operations: object, requests: BinaryIO, replies: BinaryIO, names: Sequence[str]) -> None:
    """Answer requests, each a call of an operation, until the end of stdin.

    names: of the methods of `operations` that may be called. Exits if the pipe of the replies is no
    longer the same, because external code replaced it. A copy of the process that external code
    made by `os.fork`, and that returned to this function, ends without a reply.
    """
    pipe, process = os.fstat(replies.fileno()), os.getpid()
    for line in requests:
        message = decode(line)
        answer = _answer(operations, message, names)
        if os.getpid() != process:
            os._exit(1)
        if not os.path.samestat(os.fstat(replies.fileno()), pipe):
            sys.exit("its code replaced the pipe of this process's replies")
        replies.write(encode({"id": message["id"], **answer}))
        replies.flush()


def end_process() -> NoReturn:
    """End this process without the cleanup of Python and libraries: 0.3 to 0.5 s with torch."""
    sys.stderr.flush()
    os._exit(0)


def _answer(operations: object, message: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    arguments = {key: value for key, value in message.items() if key not in ("id", "do")}
    name = message["do"]
    if name not in names:
        return {"error": f"this commit can't {name!r}", "refused": False}
    operation: Callable[..., dict[str, Any]] = getattr(operations, name)
    try:
        return {"reply": operation(**arguments)}
    except _REFUSALS as error:
        is_unsupported = isinstance(error, UnsupportedError)
        return {"error": _message(error), "refused": True, "unsupported": is_unsupported}
    # a kernel may raise any exception; the other end decides what it means
    except Exception as error:
        return {"error": f"{type(error).__name__}: {_message(error)}", "refused": False}


def _message(error: Exception) -> str:
    text = one_line(error)
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[: _MAX_ERROR_CHARS - 2]} …"


def own_pipes() -> tuple[BufferedReader, BinaryIO]:
    """Stdin for requests and stdout for replies, both private.

    From now on output of libraries goes to stderr, and a library that reads stdin finds its end.
    """
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return requests, replies
