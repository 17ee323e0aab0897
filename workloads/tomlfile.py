"""Strict reading of the data files: a key that nobody reads is an error, not a silence."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from importlib.resources.abc import Traversable
from typing import Any

from workloads.errors import WorkloadError
from workloads.names import nearest_first


class Table:
    """One TOML table of a file. `where` names it in errors, for example `smoke.toml, group 2`."""

    def __init__(self, values: dict[str, Any], where: str, keys: Sequence[str]) -> None:
        """Raises WorkloadError if there is a key that is not one of `keys`."""
        for key in values:
            if key not in keys:
                near = nearest_first(key, keys)
                raise WorkloadError(f"{where}: no key {key!r} here: the keys are {', '.join(near)}")
        self.where = where
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty, or the default where there is one."""
        value = self._get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.error(key, "a string that is not empty", value)
        return value

    def texts(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of at least one string."""
        value = self._get(key, default)
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or not all(isinstance(item, str) and item for item in value):
            raise self.error(key, "a list of strings", value)
        return tuple(value)

    def text_or_texts(self, key: str, default: str) -> str | tuple[str, ...]:
        """A string, or a list of at least one."""
        is_text = isinstance(self._get(key, default), str)
        return self.text(key, default) if is_text else self.texts(key)

    def integer(self, key: str) -> int:
        """An integer of at least 1."""
        value = self._get(key, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "an integer of at least 1", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0, or the default where there is one."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise self.error(key, "a number of at least 0", value)
        return float(value)

    def day(self, key: str) -> date:
        """A date, written 2026-01-31 without quotes."""
        value = self._get(key, None)
        if not isinstance(value, date) or isinstance(value, datetime):
            raise self.error(key, "a date like 2026-01-31, without quotes", value)
        return value

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self._get(key, None)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def table(self, key: str) -> dict[str, Any]:
        """The table of `[key]`."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, f"a table, under [{key}]", value)
        return value

    def tables(self, key: str) -> tuple[dict[str, Any], ...]:
        """The tables of `[[key]]`, at least one."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"tables, each under [[{key}]]", value)
        if not value:
            raise WorkloadError(f"{self.where}: needs at least one [[{key}]]")
        return tuple(value)

    @contextmanager
    def blame(self, key: str) -> Iterator[None]:
        """A WorkloadError raised inside says that it came from this key."""
        try:
            yield
        except WorkloadError as error:
            raise WorkloadError(f"{self.where}: {key}: {error}") from error

    def error(self, key: str, wanted: str, value: object) -> WorkloadError:
        """What is wrong with a key's value; the caller raises it."""
        return WorkloadError(f"{self.where}: {key} must be {wanted}, got {value!r}")

    def _get(self, key: str, default: Any) -> Any:
        if key not in self._values and default is None:
            raise WorkloadError(f"{self.where}: {key} is missing")
        return self._values.get(key, default)


def read_toml(file: Traversable) -> dict[str, Any]:
    """A file's top table. Raises WorkloadError if it can't be read or is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"can't read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, nested without end
        raise WorkloadError(f"{file.name} is not TOML: {error}") from error
