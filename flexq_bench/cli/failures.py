"""The exit code of an error, and its message as one line."""

from __future__ import annotations

import errno

from flexq_bench.db.errors import (
    DatabaseError,
    LimitError,
    MissingDatabaseError,
    NotFoundError,
    RecordError,
    ResultsFileError,
    UnknownSchemeError,
)
from flexq_bench.errors import FlexqError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.errors import CacheError, CompileError, KernelError
from flexq_bench.workloads.errors import WorkloadError

# Errors of the user's input; any other DatabaseError is a failure of the database.
_USAGE_OF_DATABASE = (
    LimitError,
    MissingDatabaseError,
    NotFoundError,
    RecordError,
    ResultsFileError,
    UnknownSchemeError,
)


def exit_code_of(error: Exception) -> ExitCode | None:
    """The exit code of an expected error; None: a defect of this program."""
    if _is_full(error) or (
        isinstance(error, FlexqError | ResultsFileError) and _is_full(error.__cause__)
    ):
        return ExitCode.INFRASTRUCTURE
    if isinstance(error, FlexqError):
        return error.exit_code
    if isinstance(error, (WorkloadError, *_USAGE_OF_DATABASE)):
        return ExitCode.USAGE
    if isinstance(error, DatabaseError | CacheError | CompileError):
        return ExitCode.INFRASTRUCTURE
    if isinstance(error, KernelError):
        return ExitCode.USAGE
    return None


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
