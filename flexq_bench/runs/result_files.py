"""Files of records that `run` and `sweep` write in addition to the database."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.errors import UsageError
from flexq_bench.packages import require_extra

if TYPE_CHECKING:
    from flexq_bench.db.records import AnyRecord

STDOUT = "-"
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz")
_PARQUET_SUFFIX = ".parquet"
_OUT_SUFFIXES = (*_JSON_SUFFIXES, _PARQUET_SUFFIX)


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Files to write records to; None: not written. json "-": stdout.

    Raises UsageError for a file that can't be written, and MissingExtraError if its format needs an
    extra, so that this is known before measuring.
    """

    json: str | None = None
    out: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.json is not None and self.json != STDOUT:
            _check(self.json, "--json", _JSON_SUFFIXES)
        if self.out is not None:
            _check(self.out, "--out", _OUT_SUFFIXES)
            if self.out.lower().endswith(_PARQUET_SUFFIX):
                require_extra("parquet", f"--out {self.out}")
        if self.plot is not None:
            _check(self.plot, "--plot", (".png",))
            require_extra("plots", "sweep --plot")

    @property
    def uses_stdout(self) -> bool:
        return self.json == STDOUT

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.json, self.out) if path and path != STDOUT)

    def write(self, records: Iterable[AnyRecord]) -> None:
        """Write the records to all files. Raises DatabaseError if a file can't be written."""
        from flexq_bench.db.exchange import record_line, write_records  # imports numpy

        records = list(records)
        if self.uses_stdout:
            for record in records:
                sys.stdout.write(record_line(record) + "\n")
            sys.stdout.flush()
        for path in self.paths:
            write_records(path, records)


def _check(path: str, option: str, suffixes: tuple[str, ...]) -> None:
    if not path.lower().endswith(suffixes):
        raise UsageError(f"{option} {path}: the name must end in {', '.join(suffixes)}")
    check_writable(option, path)


def make_folder(option: str, folder: Path) -> None:
    """Create a folder for results unless it exists. To be called before measuring.

    Raises UsageError if that is not possible, or the folder can't be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{option} {folder} can't be created: {reason}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {folder} can't be written: its permissions forbid it")


def check_writable(option: str, path: str) -> None:
    """Raise UsageError unless the file can be written. To be called before measuring."""
    try:
        file = Path(path).absolute()
        if not path.strip() or file.is_dir():
            raise UsageError(f"{option} {path!r} is a folder: name a file in it")
        if not file.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {file.parent}: make it first")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UsageError(f"{option} {path} can't be written: its permissions forbid it")
    except (OSError, ValueError) as error:  # too long, or a NUL in it
        raise UsageError(f"{option} {path[:60]!r} is no name of a file: name another") from error
