"""Validation of TOML data files; an error is one line with the file, the entry and the key.

A table of a file is a subclass of `DataTable`, whose fields have the types below. Unknown keys are
errors.
"""

from __future__ import annotations

import errno
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import nearest_first


class DataTable(BaseModel):
    """One table of a file, as a frozen value.

    NAME_KEY: key with the name of an entry of `[[…]]` for errors; empty: use its number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    NAME_KEY: ClassVar[str] = ""


TableT = TypeVar("TableT", bound=DataTable)
Entries = Annotated[tuple[TableT, ...], Field(min_length=1)]  # `[[…]]`, at least one


class FormError(ValueError):
    """Raised by validators for a value of the wrong form."""

    def __init__(self, form: str, value: object) -> None:
        super().__init__(f"must be {form}, got {value!r}")


def must_be(form: str) -> WrapValidator:
    """Report any error of a field as `must be <form>`."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            raise FormError(form, value) from None

    return WrapValidator(check)


def parsed_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Validate a string that is not empty and parse it; `parse` may raise WorkloadError."""

    def convert(value: object) -> object:
        if not isinstance(value, str) or not value:
            raise FormError("a string that is not empty", value)
        return parse(value)

    return BeforeValidator(convert)


def parsed_texts(parse: Callable[[tuple[str, ...]], object]) -> BeforeValidator:
    """Validate a list of at least one string and parse it; `parse` may raise WorkloadError."""

    def convert(value: object) -> object:
        texts = tuple(value) if isinstance(value, list | tuple) else ()
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise FormError("a list of strings", value)
        return parse(texts)

    return BeforeValidator(convert)


Text = Annotated[str, Field(strict=True, min_length=1), must_be("a string that is not empty")]
AnyText = Annotated[str, Field(strict=True), must_be("a string")]
Texts = Annotated[tuple[str, ...], parsed_texts(lambda texts: texts)]
Count = Annotated[int, Field(strict=True, ge=1), must_be("an integer of at least 1")]
Natural = Annotated[int, Field(strict=True, ge=0), must_be("an integer of at least 0")]
Amount = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False), must_be("a number of at least 0")
]
Share = Annotated[
    float, Field(strict=True, ge=0, le=1, allow_inf_nan=False), must_be("a number from 0 to 1")
]
Flag = Annotated[bool, Field(strict=True), must_be("true or false")]
Day = Annotated[date, Field(strict=True), must_be("a date like 2026-01-31, without quotes")]


MAX_BYTES = 1 << 20  # of a file; usual ones have some thousand
_MAX_NESTING = 32  # depth of tables and lists
# Dotted keys of too many parts: tomllib needs O(n^2) memory for n parts.
_DEEP_KEY = re.compile(
    r"""(?<![\w"'.-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*)"""
    f"{{{_MAX_NESTING}}}"
)


def read_toml(file: Traversable) -> dict[str, Any]:
    """Return the top table of a file.

    Raises WorkloadError if the file can't be read, is not TOML, has more than MAX_BYTES, or is
    nested too deep.
    """
    try:
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")  # reading a pipe may block forever
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise WorkloadError(f"can't read {file}: {getattr(error, 'strerror', error)}") from error
    if len(content) > MAX_BYTES:
        raise WorkloadError(f"{file} is larger than {MAX_BYTES:,} bytes: name a smaller file")
    try:
        text = content.decode()
        is_deep = _DEEP_KEY.search(text) is not None
        values = {} if is_deep else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, nested too deep
        raise WorkloadError(f"{file.name} is not TOML: {error}") from error
    if is_deep or _is_deep(values):
        raise WorkloadError(f"{file.name} is nested more than {_MAX_NESTING} deep: write it flat")
    return values


def _is_deep(values: dict[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(_MAX_NESTING):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def validated(table: type[TableT], values: dict[str, Any], where: str) -> TableT:
    """Return the validated values of a table. where: its name in errors, for example `smoke.toml`.

    Raises WorkloadError with the first error.
    """
    try:
        return table.model_validate(values)
    except ValidationError as error:
        # A misspelled key also causes "missing": report the unknown key first.
        details = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        raise WorkloadError(_one_line(dict(details), table, values, where)) from None


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """Prefix the message of a WorkloadError raised inside the block with `where`."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from error


def _one_line(details: Mapping[str, Any], table: type[DataTable], values: Any, where: str) -> str:
    kind, path, context = details["type"], list(details["loc"]), details.get("ctx", {})
    from_validator = kind == "value_error"  # of a field or of a table
    while path and (inner := _nested(table.model_fields, path[0])) is not None:
        steps = 2 if len(path) > 1 and isinstance(path[1], int) else 1
        if len(path) == steps and not from_validator:
            break  # the entry itself is wrong
        values = values[path[0]]
        if steps == 2:
            values = values[path[1]]
            name = values.get(inner.NAME_KEY)
            where += f", {name}" if isinstance(name, str) else f", {path[0]} {int(path[1]) + 1}"
        else:
            where += f", {path[0]}"
        table, path = inner, path[steps:]
    key = str(path[0]) if path else ""
    got = f"got {details['input']!r}"
    if kind == "extra_forbidden":
        near = nearest_first(key, table.model_fields)
        return f"{where}: no key {key!r} here: the keys are {', '.join(near)}"
    if kind == "missing":
        return f"{where}: {key} is missing"
    if kind == "value_error":
        reason = context["error"]
        if isinstance(reason, FormError):
            return f"{where}: {key} {reason}"
        return f"{where}: {key}: {reason}" if key else f"{where}: {reason}"
    if _nested(table.model_fields, key) is not None:
        if kind == "too_short":
            return f"{where}: needs at least one [[{key}]]"
        if kind == "model_type" and len(path) == 1:
            return f"{where}: {key} must be a table, under [{key}], {got}"
        return f"{where}: {key} must be tables, each under [[{key}]], got {values[key]!r}"
    return f"{where}: {key}: {details['msg']}, {got}"


def _nested(fields: Any, key: int | str) -> type[DataTable] | None:
    """Return the table type of a field, also of a list of tables; None: a plain value."""
    return _table_in(fields[key].annotation) if key in fields else None


def _table_in(annotation: Any) -> type[DataTable] | None:
    if isinstance(annotation, type) and issubclass(annotation, DataTable):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)
