"""One-line reasons for the loss of a worker, from the exceptions that Ray raises."""

from __future__ import annotations

import re

_CLASS_NAME = re.compile(r"^[\w.]+: ")
_GENERAL_ADVICE = " Some common causes include"


def reason_of(error: BaseException) -> str:
    """Return the reason in one line.

    Ray wraps an actor's exception in a traceback whose first line names only the actor, and reports
    a death in the last line of a list of the actor's properties.
    """
    raised = getattr(error, "cause", None)
    if raised is not None:
        return reason_of(raised)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if getattr(error, "actor_init_failed", False):
        return _CLASS_NAME.sub("", lines[-1])
    is_list = any(line.startswith("actor_id:") for line in lines)
    return (lines[-1] if is_list else lines[0]).partition(_GENERAL_ADVICE)[0]


def is_of_node(reason: str) -> bool:
    """Return True if the worker died because its node did."""
    return "its node has died" in reason
