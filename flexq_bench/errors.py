"""Exceptions of the service; the command line prints the message and exits with exit_code.

FlexqError
├── UsageError             a request that cannot be fulfilled               exit 2
│   ├── DeviceError        no such device on this machine
│   └── MeasureError       a case that can't be measured here as asked
├── MissingResultsError    planned results did not arrive                   exit 4
├── InfrastructureError    a machine, a device or a store failed            exit 5
│   ├── BrokenRevisionError      code that does not build, or whose worker does not start
│   └── MissingExtraError        an extra of pyproject.toml is not installed
└── CancelledError         the requester cancelled the work                 exit 5
"""

from __future__ import annotations

from typing import ClassVar

from flexq_bench.exit_codes import ExitCode


class FlexqError(Exception):
    """Base class of exceptions of flexq_bench/. The message is one line."""

    exit_code: ClassVar[ExitCode] = ExitCode.INFRASTRUCTURE


class UsageError(FlexqError):
    """A request that cannot be fulfilled; the message gives the reason and what to do."""

    exit_code = ExitCode.USAGE


class DeviceError(UsageError):
    """No such device on this machine; the message lists devices, similar names first."""


class MeasureError(UsageError):
    """A case that can't be measured here, for example for lack of memory."""


class MissingResultsError(FlexqError):
    """Planned results did not arrive."""

    exit_code = ExitCode.MISSING


class InfrastructureError(FlexqError):
    """A machine, a device or a store failed; the command can be repeated."""

    exit_code = ExitCode.INFRASTRUCTURE


class BrokenRevisionError(InfrastructureError):
    """A revision's code does not build, or its worker does not start; other revisions may work."""


class MissingExtraError(InfrastructureError):
    """An extra is not installed; the message has the command that installs it."""


class CancelledError(FlexqError):
    """The requester cancelled the work; results measured so far are stored."""


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line; its class if it has none. Never raises."""
    try:
        return " ".join(str(error).split()) or type(error).__name__
    except Exception:  # __str__ of external code may raise anything
        return "no message"


def library_reason(error: BaseException) -> str:
    """Return the first line of the message of a library's exception; its class if it has none.

    A first line that only announces the second one, by a colon, is returned with it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):  # its message is quoted, and usually the key alone
        sentence = str(error.args[0]).strip().partition("\n")[0]
        return sentence if " " in sentence else f"there is no {lines[0]}"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
