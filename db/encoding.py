"""Encode a record as a flat mapping of JSON values, and decode it: the format of all files.

`run` and `commit` are the run's uuid and the commit's sha; their other fields are under `run_info`
and `commit_info`. Reading and storing apply the same checks: a value of the wrong type, a NaN or an
infinity is rejected with the name of its field. `kind` is present only in records that are not
measurements.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from flexq_bench.db.errors import RecordError
from flexq_bench.db.ranges import check_number, check_numbers, range_of
from flexq_bench.db.records import (
    ACCURACY_STATUSES,
    COMPARABLE_STATUSES,
    DECODE_STATUSES,
    GATE_OUTCOMES,
    LINEAR,
    MODEL_KINDS,
    RUN_STATUSES,
    SCHEMA_VERSION,
    STATUSES,
    THROUGH,
    TIME_METRICS,
    AccuracyRecord,
    AnyRecord,
    DecodeRecord,
    GateLimit,
    GateRecord,
    Record,
    RunInfo,
    ServingRecord,
)

T = TypeVar("T")
# Record field -> key of the full object, and the attribute that is written under the field's name.
NESTED = {"run": ("run_info", "uuid"), "commit": ("commit_info", "sha")}
DEVICE_KEY = "device_info"
KIND_KEY = "kind"  # absent in measurements
_TIMES = {"created_at", "committed_at"}
_CHOICES = {
    (Record, "status"): STATUSES,
    (Record, "direction"): ("lower", "higher"),
    (RunInfo, "status"): RUN_STATUSES,
    (AccuracyRecord, "status"): ACCURACY_STATUSES,
    (AccuracyRecord, "direction"): ("lower", "higher"),
    (AccuracyRecord, "through"): THROUGH,
    (DecodeRecord, "status"): DECODE_STATUSES,
    (ServingRecord, "status"): DECODE_STATUSES,
    (GateRecord, "verdict"): GATE_OUTCOMES,
    (GateRecord, "through"): THROUGH,
    (GateLimit, "outcome"): GATE_OUTCOMES,
}
INT64 = range(-(2**63), 2**63)
_NEW_FIELDS = ("parents", "branch")  # of a commit
_OPERATION_FIELDS = ("operation", "parameters")
# Names in files of the values of a measurement whose unit is no microsecond.
IN_UNIT = {
    "median_us": "value",
    "ci_low_us": "value_low",
    "ci_high_us": "value_high",
    "placement_medians_us": "placement_values",
    "samples_us": "samples",
}
_MAX_LETTERS = 1 << 16  # of a text in a file of records
_PLAIN = frozenset((str, int, float, bool, NoneType, dict))  # types of most values
_fields: Callable[[Any], tuple[dataclasses.Field[Any], ...]] = cache(fields)  # of a class
_LAST_INFO: dict[type, tuple[object, object]] = {}  # type -> last input (immutable), checked copy
_LAST_PLAIN: dict[type, tuple[object, dict[str, Any]]] = {}  # the same, as a mapping


def canonical(info: T) -> T:
    """Return a record, commit or run in the form that reading it from a file gives.

    Its values have plain types, its times are in UTC. A max_rel_error that is not finite becomes
    None: the output was not finite either. Raises RecordError if a field can't be stored.
    """
    return type(info)(**_canonical_values(info))


def _values(info: Any) -> dict[str, Any]:
    kind: Any = type(info)
    names, values_of = _getter(kind)
    return dict(zip(names, values_of(info), strict=True))


@cache
def _getter(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """Return the names of a class's fields, of which there are several, and what gets them."""
    names = [f.name for f in _fields(kind)]
    return names, attrgetter(*names)


def _canonical_values(info: Any) -> dict[str, Any]:
    values = _values(info)
    error = values.get("max_rel_error")
    if isinstance(error, Real) and not math.isfinite(error):
        values["max_rel_error"] = None
    return _checked(type(info), values)


def encode_record(record: AnyRecord, *, stored: bool = False) -> dict[str, Any]:
    """Return a record as a flat mapping, in the order of its fields. Raises RecordError.

    stored: it was read from a database, so it was checked when it was stored.
    """
    flat: dict[str, Any] = {"schema_version": record.schema_version}
    kind = next((name for name, owner in MODEL_KINDS.items() if isinstance(record, owner)), None)
    if kind is not None:
        flat[KIND_KEY] = kind
    values = _values(record) if stored else _canonical_values(record)
    infos: dict[str, Any] = {}
    for name, (key, part) in NESTED.items():
        infos[key] = _plain_info(values[name])
        values[name] = getattr(values[name], part)
    infos[DEVICE_KEY] = _plain_info(values.pop("device"))
    if _is_linear(record):
        for name in _OPERATION_FIELDS:
            del values[name]
    for name, value in values.items():
        if type(value) not in _PLAIN:
            values[name] = plain_value(value)
    flat |= values
    if isinstance(record, Record) and record.unit != "us":
        flat = {IN_UNIT.get(name, name): value for name, value in flat.items()}
    return flat | infos


def _plain_info(info: object) -> dict[str, Any]:
    """Return a run, commit or device as a mapping, the same one for consecutive results.

    The empty fields that earlier versions, which refuse unknown ones, don't have are left out.
    """
    last = _LAST_PLAIN.get(type(info))
    if last is None or last[0] is not info:
        values = plain_value(info).items()
        plain = {name: value for name, value in values if value or name not in _NEW_FIELDS}
        last = _LAST_PLAIN[type(info)] = info, plain
    return last[1]


def _is_linear(record: AnyRecord) -> bool:
    return isinstance(record, Record) and record.operation == LINEAR


def decode_record(flat: Mapping[str, Any]) -> AnyRecord:
    """Return the record of a flat mapping.

    Raises RecordError for another schema version, or a mapping that is not a record.
    """
    version = flat.get("schema_version")
    if version is None:
        raise RecordError("no schema_version: this is not a FlexQ Bench result")
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}: "
            "export it again with a matching flexq-bench"
        )
    values = dict(flat)
    owner = _record_type(values.pop(KIND_KEY, None))
    if owner is Record:
        # Columns of a Parquet file are null for linear layers, whose files are those of before.
        for name in _OPERATION_FIELDS:
            if values.get(name) is None:
                values.pop(name, None)
        for field, name in IN_UNIT.items():
            value = values.pop(name, None)
            if value is not None or field not in values:
                values[field] = value
    for name, (key, part) in NESTED.items():
        info = values.pop(key, None)
        if not isinstance(info, Mapping):
            raise RecordError(f"{key} is missing")
        if info.get(part) != values.get(name):
            raise RecordError(f"{name} is not the {part} in {key}")
        values[name] = info
    values["device"] = values.pop(DEVICE_KEY, None)
    _check_lengths(values, "a field")
    return owner(**_checked(owner, values))


def _check_lengths(value: Any, name: str) -> None:
    """Raise RecordError if a text in a value is longer than any that a page shows."""
    if isinstance(value, str):
        if len(value) > _MAX_LETTERS:
            raise RecordError(f"{name} has {len(value):,} letters, {_MAX_LETTERS:,} are the most")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _check_lengths(key, f"a key of {name}")
            _check_lengths(entry, key)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, Mapping)):
        for item in value:
            _check_lengths(item, name)


def _record_type(kind: object) -> type[AnyRecord]:
    if kind is None:
        return Record
    if not isinstance(kind, str) or kind not in MODEL_KINDS:
        raise RecordError(
            f"kind is {kind!r}, not one of {', '.join(MODEL_KINDS)}: upgrade flexq-bench"
        )
    return MODEL_KINDS[kind]


def plain_value(value: Any) -> Any:
    """Return a dataclass as a mapping of its fields, a tuple of dataclasses as a list of mappings.

    Any other value is returned as it is.
    """
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in _fields(type(value))}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [plain_value(item) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of a dataclass's fields. Raises RecordError."""
    hints = _hints(kind)
    unknown = values.keys() - hints.keys()
    if unknown:
        raise RecordError(f"unknown field {min(map(str, unknown))!r}")
    missing = hints.keys() - values.keys() - _fields_with_default(kind)
    if missing:
        raise RecordError(f"{min(missing)} is missing")
    checked = {
        name: convert(values[name])
        for name, convert in _conversions(kind).items()
        if name in values
    }
    for name, choices in _choices(kind).items():
        if name in checked and checked[name] not in choices:
            raise RecordError(f"{name} is {checked[name]!r}, not one of {', '.join(choices)}")
    if kind is Record:
        _check_result(checked)
    return checked


def _check_result(record: Mapping[str, Any]) -> None:
    """Raise RecordError for an impossible result, since histories are computed from results."""
    median, status = record["median_us"], record["status"]
    if record["accepted"] and (median is None or status not in COMPARABLE_STATUSES):
        reason = "median_us is null" if median is None else f"status is {status!r}"
        raise RecordError(f"accepted is true, and {reason}: what can't be compared is not accepted")
    regime = record.get("regime")
    if regime is not None and TIME_METRICS.get(regime) != record["metric"]:
        raise RecordError(f"regime is {regime!r}, and metric is {record['metric']!r}")
    if record["metric"] not in TIME_METRICS.values():
        return
    for name in ("median_us", "ci_low_us", "ci_high_us", "floor_us"):
        if record[name] is not None and record[name] <= 0:
            raise RecordError(f"{name} is {record[name]}: a time is above 0")
    low, high = record["ci_low_us"], record["ci_high_us"]
    if low is not None and high is not None and low > high:
        raise RecordError(f"ci_low_us is {low} and ci_high_us is {high}: an interval runs upwards")


@cache
def _choices(kind: type) -> dict[str, Any]:
    """Return the values that some fields may have, by name."""
    return {name: choices for (owner, name), choices in _CHOICES.items() if owner is kind}


@cache
def _fields_with_default(kind: type) -> frozenset[str]:
    """Return the fields with a default: they were added later, and older files lack them."""
    return frozenset(f.name for f in fields(kind) if f.default is not dataclasses.MISSING)


@cache
def _conversions(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Return the function that checks a value, by the name of its field."""
    return {name: _conversion(hint, name) for name, hint in _hints(kind).items()}


def _conversion(hint: Any, name: str) -> Callable[[Any], Any]:
    """Return the function that checks a value by its type hint and its field's name."""
    if NoneType in get_args(hint):
        convert = _conversion(get_args(hint)[0], name)
        return lambda value: None if value is None else convert(value)
    origin, parts = get_origin(hint), get_args(hint)
    last = next((part for part in reversed(parts) if part is not Ellipsis), None)
    if origin is tuple:
        convert_item = _conversion(last, name)
        return lambda value: _sequence(value, last, convert_item, name)
    if origin is dict:
        return lambda value: _mapping(value, last, name)
    if is_dataclass(hint):
        return lambda value: _info(value, hint, name)
    low, high = range_of(name)
    # Usual values pass by one comparison; all others are checked one rule after another.
    if hint is str and name not in _TIMES:
        return lambda value: value if _is_usual_text(value) else _scalar(value, hint, name)
    if hint in (int, float):
        return lambda value: (
            value if type(value) is hint and low <= value <= high else _scalar(value, hint, name)
        )
    return lambda value: _scalar(value, hint, name)


def _is_usual_text(value: object) -> bool:
    return type(value) is str and value.isascii() and "\x00" not in value


def _info(value: Any, kind: Any, name: str) -> Any:
    if isinstance(value, kind):
        # Consecutive results of a run share their run, commit and device objects: check each once.
        last = _LAST_INFO.get(kind)
        if last is None or last[0] is not value:
            last = _LAST_INFO[kind] = value, _built(plain_value(value), kind, name)
        return last[1]
    return _built(value, kind, name)


def _built(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} must be an object, got {_shown(value)}")
    try:
        return kind(**_checked(kind, value))
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None


def _sequence(value: Any, item: Any, convert: Callable[[Any], Any], name: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) and not _is_numpy(value, "ndarray"):
        raise RecordError(f"{name} must be a list, got {_shown(value)}")
    # Fast path for raw samples: much faster than one call per number.
    if item is float and set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        check_numbers(name, value)
        return tuple(value)
    return tuple(map(convert, value))


def _mapping(value: Any, item: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} must be an object, got {_shown(value)}")
    if all(map(_is_usual_text, (*value, *value.values()))):
        return {key: value[key] for key in sorted(value)}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{name} holds what JSON can't: {error}") from None
    for key, entry in plain.items():
        _scalar(key, str, name)
        if item is str:
            _scalar(entry, str, f"{name}.{key}")
    return plain


def _scalar(value: Any, kind: Any, name: str) -> Any:
    if kind is str and isinstance(value, str):
        return _time(value, name) if name in _TIMES else _text(value, name)
    if kind is bool and (isinstance(value, bool) or _is_numpy(value, "bool_")):
        return bool(value)
    is_number = type(value) in (int, float) or (
        isinstance(value, Real) and not isinstance(value, bool)
    )
    if kind is int and is_number and isinstance(value, Integral):
        number = int(value)
        if number not in INT64:
            raise RecordError(f"{name} is {number}, out of range")
        check_number(name, number)
        return number
    if kind is float and is_number:
        try:
            real = float(value)
        except OverflowError:  # an integer of hundreds of digits
            real = math.inf
        if not math.isfinite(real):
            raise RecordError(f"{name} is {real}: only finite numbers are stored")
        check_number(name, real)
        return real
    word = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[kind]
    raise RecordError(f"{name} must be {word}, got {_shown(value)}")


def _is_numpy(value: Any, kind: str) -> bool:
    """Return True if value is of this class of numpy, which most commands need not import."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecordError(f"{name} is not Unicode text: {_shown(value)}") from None
    if "\x00" in value:
        raise RecordError(f"{name} holds a NUL, which PostgreSQL can't store: {_shown(value)}")
    return str(value)


@lru_cache(maxsize=1024)
def _time(value: str, name: str) -> str:
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        pass  # raised below, as for a time without a zone
    raise RecordError(f"{name} must be an ISO 8601 time with its zone, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
