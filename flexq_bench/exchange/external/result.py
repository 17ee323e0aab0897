"""Result of another tool, as every reader returns it, and the limits that apply to all readers."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from flexq_bench.db.jsonlines import count_cells
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.units import RATIO, conversion, is_rate, scale_of, without_execution
from flexq_bench.errors import UsageError
from flexq_bench.runs.record import tera_operations
from flexq_bench.runs.text_files import read_text
from flexq_bench.workloads.names import listed

MAX_BYTES = 1 << 26  # per file: 64 MiB
MAX_CELLS = 1 << 22  # values, lists and objects per file; parsed, each takes up to 100 bytes
MAX_RESULTS = 50_000  # per file of a format that is read as a whole
BATCH = 5_000  # results of the others that are in memory at a time
MAX_SAMPLES = 1 << 20  # per result
_MAX_NAME_LENGTH = 400
_MAX_DETAIL_LENGTH = 300
_MAX_KEPT = 4096  # letters of JSON
_MIN_US, _MAX_US = 1e-6, 1e12  # 1 ps to 11 days
_MAX_VALUE = 1e12  # of a metric other than time
_MAX_DIMENSION = 2**31 - 1
_MAX_TOPS = 1e9
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # address of an object: differs between processes
_AXIS_TAG = re.compile(r"\{\w+\}$")  # of CUB's axes: M{io}, T{ct}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SHA = re.compile(r"[0-9a-f]{7,64}")
_US = "us"


class BadResult(ValueError):  # noqa: N818 (never leaves the reader: it becomes a Refused)
    """A result of a file is invalid. The message is a phrase that follows the result's name."""


@dataclass(frozen=True, slots=True)
class ExternalResult:
    """One benchmark with its parameters. If metric is `time`, values are in microseconds.

    median None: the benchmark failed, detail gives the reason. low, high: ends of the 95 %
    interval; None: not in the file. samples: in measurement order; empty: not in the file. variant:
    all parameters except m, n, k, as text. device: where it ran; empty: not in the file. cache: as
    in records. commit: that was measured; None: not in the file. created_at: ISO 8601 with its
    zone; None: not in the file. occasion: id of the tool's run; empty: not in the file.
    sm_clock_mhz: mean while it was measured; None: not in the file. remarks: what makes it less
    comparable, for a person.
    """

    name: str
    variant: str
    median: float | None
    low: float | None = None
    high: float | None = None
    samples: tuple[float, ...] = ()
    n_samples: int = 0
    metric: str = "time"
    unit: str = "us"
    direction: str = "lower"
    cache: str = ""
    shape: tuple[int, int, int] = (1, 1, 1)  # m, n, k; 1 if a benchmark has no such parameter
    operation: str = ""  # other than a GEMM's; empty: a GEMM, or not known
    parameters: str = ""  # of the operation, as `batch=1 heads=32`
    device: str = ""
    detail: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    commit: CommitInfo | None = None
    created_at: str | None = None
    occasion: str = ""
    sm_clock_mhz: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A rejected result of a file: its name there, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Content of a file, or a part of it. created_at: its creation time, commit: the commit that
    its tool ran at, both as the file states it; None: it does not. machine: what the file states of
    its machine if it names no device; empty: nothing. occasion: as of a result."""

    results: tuple[ExternalResult, ...]
    refused: tuple[Refused, ...] = ()
    created_at: str | None = None
    commit: str | None = None
    machine: str = ""
    occasion: str = ""


Entries = Iterable[tuple[str, Callable[[], ExternalResult | Iterable[ExternalResult] | None]]]


def collect(
    entries: Entries, *, created_at: str | None = None, machine: str = "", occasion: str = ""
) -> Reading:
    """Read the entries of a file one by one; an invalid one is refused, the others are still read.

    entries: name and reader; a reader returns None for an entry without a result. Raises UsageError
    for a file with more than 50,000 results.
    """
    reading = next(collect_batches(entries, MAX_RESULTS + 1))
    if len(reading.results) + len(reading.refused) > MAX_RESULTS:
        raise UsageError(f"more than {MAX_RESULTS:,} results in a file: split it")
    return replace(reading, created_at=created_at, machine=machine, occasion=occasion)


def collect_each(
    items: Iterable[Any],
    read: Callable[[Any], ExternalResult | Iterable[ExternalResult] | None],
    what: str,
    *,
    key: str = "",
) -> Reading:
    """Read the items of a list like `collect`. An item's name is under `key`, else its place."""
    return collect(
        (str(item.get(key) or "") if key and isinstance(item, Mapping) else f"{what} {place}",
         partial(read, item))
        for place, item in enumerate(items, start=1)
    )  # fmt: skip


def collect_batches(entries: Entries, size: int) -> Iterator[Reading]:
    """Read entries like `collect`, in parts of about `size` results; there is at least one part."""
    results: list[ExternalResult] = []
    refused: list[Refused] = []
    identities: set[int] = set()  # hashes: of millions of results, identities take much memory
    is_first = True
    for name, read in entries:
        try:
            entry = read()
            for result in [entry] if isinstance(entry, ExternalResult) else entry or ():
                try:
                    results.append(_checked(result, identities))
                except BadResult as error:  # the others of the entry may be valid
                    refused.append(Refused(_shown(name), str(error)))
        except BadResult as error:
            refused.append(Refused(_shown(name), str(error)))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else "it has another form"
            refused.append(Refused(_shown(name), what))
        if len(results) + len(refused) >= size:
            yield Reading(tuple(results), tuple(refused))
            is_first = False
            results.clear()
            refused.clear()
    if results or refused or is_first:
        yield Reading(tuple(results), tuple(refused))


def read_json(path: str, what: str) -> dict[str, Any]:
    """Read the object of a JSON file, of at most 64 MiB and MAX_CELLS values. Raises UsageError.

    what: the expected kind of file, for example `an nvbench file`.
    """
    value = read_value(path, what)
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no JSON object: name {what}")
    return value


def read_value(path: str, what: str, *, start: str = "") -> Any:
    """Read the value of a JSON file, which may follow `start =` and be followed by a semicolon.

    Raises UsageError like `read_json`.
    """
    text = read_text(path, what, most_bytes=MAX_BYTES)
    if count_cells(text) > MAX_CELLS:
        raise UsageError(f"{path} has over {MAX_CELLS:,} values: split it")
    try:
        return json.loads(text.strip().removeprefix(start).lstrip("= ").removesuffix(";"))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON: name {what}") from None


def read_objects(path: str, what: str) -> list[Any]:
    """Read a JSON file of an object or a list of them, or JSON lines. Raises UsageError."""
    text = read_text(path, what, most_bytes=MAX_BYTES).strip()
    first, _, rest = text.partition("\n")
    if not (rest and first.startswith("{") and first.rstrip().endswith("}")):
        value = read_value(path, what)
        return value if isinstance(value, list) else [value]
    if count_cells(text) > MAX_CELLS:
        raise UsageError(f"{path} has over {MAX_CELLS:,} values: split it")
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON lines: name {what}") from None


def objects_with(values: object, keys: Sequence[str], path: str, what: str) -> list[Any]:
    """Return the objects of a file. Raises UsageError if none of them has all of these keys."""
    objects = values if isinstance(values, list) else []
    if not any(isinstance(value, dict) and all(key in value for key in keys) for value in objects):
        raise UsageError(f"{path} has no object with {listed(list(keys))}: name {what}")
    return objects


def of_epoch(milliseconds: object) -> str | None:
    """Convert milliseconds since 1970 to ISO 8601 in UTC; None: it is no such time."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
    except (OverflowError, OSError, ValueError):
        return None


def list_of(value: Mapping[str, Any], key: str, path: str, what: str) -> list[Any]:
    """Return a list of a file's object. Raises UsageError if there is no list under the key."""
    items = value.get(key)
    if not isinstance(items, list):
        raise UsageError(f"{path} has no list {key!r}: name {what}")
    return items


def number(value: object, name: str) -> float:
    """Parse a finite number, which may be text. Raises BadResult."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadResult(f"{name} is no number")
    try:
        if "_" in str(value):  # Python's grouping of digits, which no other tool reads
            raise ValueError
        real = float(value)
    except (ValueError, OverflowError):
        hint = ": write it with a decimal point" if "," in str(value) else ""
        raise BadResult(f"{name} is no number{hint}") from None
    if not math.isfinite(real):
        raise BadResult(f"{name} is {real}")
    return real


def count(value: object, name: str) -> int:
    """Parse a non-negative integer, which may be text. Raises BadResult."""
    real = number(value, name)
    if real != int(real) or not 0 <= real <= 2**53:
        raise BadResult(f"{name} is no count")
    return int(real)


def in_us(value: object, unit: object, name: str) -> float:
    """Convert a time to microseconds. Raises BadResult if the unit is not one of time."""
    factor = conversion(str(unit), _US)
    if factor is None:
        raise BadResult("its unit is no time's: use one of ns, us, ms, s")
    return scaled(number(value, name), factor)


def scaled(value: float, factor: float) -> float:
    """Multiply in decimal, so that a file's digits stay: 24512 ns are 24.512 us."""
    return value if factor == 1 else float(Decimal(repr(value)) * Decimal(repr(factor)))


def by_unit(
    value: object, unit: object, *, metric: str = "value", higher: bool | None = None
) -> dict[str, Any]:
    """Return the fields of a value by its unit: a time in microseconds, a rate, or another metric.

    metric: name of one that is no time and no rate. higher: more is better; None: of a rate only.
    Raises BadResult.
    """
    text = str(unit or "").strip()
    if conversion(thing := without_execution(text), _US) is not None and not higher:
        return {"median": in_us(value, thing, "its value")}
    rate = is_rate(text)
    return {
        "median": number(value, "its value"),
        "metric": "throughput" if rate and metric == "value" else metric,
        "unit": text,
        "direction": "higher" if (rate if higher is None else higher) else "lower",
    }


def beside(
    metric: str, value: object, unit: object, *, higher: bool | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the fields of a metric that a tool reports beside the time of a benchmark.

    None of a time or a rate that is 0 or no number: nothing of it happened.
    """
    if value is None or str(value) == "NaN":
        return
    fields = by_unit(value, unit, metric=metric, higher=higher) | {"metric": metric}
    if fields["median"] or scale_of(metric, fields.get("unit", _US)) != RATIO:
        yield fields


def console_text(path: str, what: str) -> str:
    """Read the output of a program, without the codes of colours. Raises UsageError."""
    return COLOUR.sub("", read_text(path, what, most_bytes=MAX_BYTES))


def of_repeated(times: Sequence[float]) -> dict[str, Any]:
    """Return the fields of a benchmark that ran several times: their median is the value."""
    if len(times) == 1:
        return {"median": times[0]}
    median, low, high = of_samples(times)
    return {
        "median": median, "low": low, "high": high,
        "samples": tuple(times), "n_samples": len(times),
    }  # fmt: skip


def of_values(values: Iterable[object], unit: object, **how: Any) -> dict[str, Any]:
    """Return the fields of a value that was measured several times, by its unit like `by_unit`."""
    fields = [by_unit(value, unit, **how) for value in values]
    return fields[0] | of_repeated([of_value["median"] for of_value in fields])


def commit_of(sha: object, **about: Any) -> CommitInfo:
    """Return a commit that a file names, in lower case. about: other fields. Raises BadResult."""
    text = str(sha).strip().lower()
    if not _SHA.fullmatch(text):
        raise BadResult(f"its commit {cleaned(sha)[:50]!r} is no hexadecimal sha")
    return CommitInfo(text, None, None, dirty=False, **about)


def split_parameters(parameters: Mapping[str, object]) -> tuple[tuple[int, int, int], str]:
    """Split named parameters into the shape (m, n, k) and the variant.

    A parameter called m, n or k, in either case, is part of the shape if it is a count. All others
    together are the variant, for example `BlockSize=64,T=I32`.
    """
    sizes, variant = {"m": 1, "n": 1, "k": 1}, []
    for key, value in parameters.items():
        text = _ADDRESS.sub("", str(value))
        size = _AXIS_TAG.sub("", key).lower()
        if size in sizes and re.fullmatch(r"[1-9][0-9]{0,9}", text):
            sizes[size] = int(text)
        else:
            variant.append(f"{key}={text}")
    return (sizes["m"], sizes["n"], sizes["k"]), ",".join(variant)


def notches(median: float, q1: float, q3: float, n: int) -> tuple[float, float]:
    """Compute the 95 % interval of a median from its quartiles: 1.57 IQR / sqrt(n).

    Source: McGill, Tukey, Larsen 1978. The lower end stays above 0.
    """
    reach = 1.57 * (q3 - q1) / math.sqrt(n)
    return max(median - reach, median / 1000), median + reach


def of_samples(samples: Sequence[float]) -> tuple[float, float, float]:
    """Compute the median of samples and the ends of its 95 % interval (`notches`)."""
    median = _median(samples)
    if len(samples) < 4:
        return median, min(samples), max(samples)
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return (median, *notches(median, q1, q3, len(samples)))


@lru_cache(maxsize=8192)  # a history has the same names at each of its commits
def _problem_of(text: str) -> str:
    if len(text) > _MAX_NAME_LENGTH:
        return f"has {len(text)} letters, {_MAX_NAME_LENGTH} are the most"
    return "" if text.isprintable() else "holds control characters"


def _median(values: Sequence[float]) -> float:
    """Return the median, in decimal, so that of 1.05 and 1.052 it is 1.051."""
    low, high = statistics.median_low(values), statistics.median_high(values)
    return low if low == high else float((Decimal(repr(low)) + Decimal(repr(high))) / 2)


def _checked(result: ExternalResult, identities: set[int]) -> ExternalResult:
    """Return a valid result, whose identity joins the others. Raises BadResult."""
    for what, text in (
        ("its name", result.name),
        ("its parameters", result.variant),
        ("its device", result.device),
        ("its metric", result.metric),
        ("its occasion", result.occasion),
        ("its unit", result.unit),
        ("its operation's parameters", result.operation + result.parameters),
    ):
        if problem := _problem_of(text):
            raise BadResult(f"{what} {problem}")
    if not result.name.strip():
        raise BadResult("it has no name")
    if not all(1 <= size <= _MAX_DIMENSION for size in result.shape):
        raise BadResult(f"m, n and k are 1 to {_MAX_DIMENSION}")
    if result.direction not in ("lower", "higher"):
        raise BadResult("its direction is neither lower nor higher")
    if len(result.samples) > MAX_SAMPLES:
        raise BadResult(f"it has more than {MAX_SAMPLES:,} samples")
    median, low, high = result.median, result.low, result.high
    is_ratio = scale_of(result.metric, result.unit) == RATIO
    if is_ratio and median is not None and low is not None and low <= 0 < median:
        low = median / 1000  # a symmetric interval of a wide spread
        result = replace(result, low=low)
    values = [v for v in (median, low, high, *result.samples) if v is not None]
    if not all(map(math.isfinite, values)):
        raise BadResult("a value of it is not finite")
    if result.metric in ("time", "sustained_time"):
        if result.unit != "us":
            raise BadResult("its metric is a time, and its unit is none")
        for value in values:
            if not _MIN_US <= value <= _MAX_US:
                raise BadResult(f"{value:g} µs is not a plausible time")
        tops = tera_operations(2 * math.prod(result.shape), result.median)
        if tops is not None and tops > _MAX_TOPS:
            raise BadResult(f"{result.median:g} µs is not a plausible time: {tops:.3g} TOPS")
    elif any(abs(value) > _MAX_VALUE for value in values):
        raise BadResult(f"a value of it exceeds {_MAX_VALUE:g}: give it in a larger unit")
    elif is_ratio and min(values, default=1.0) <= 0:
        raise BadResult(
            f"its value is {min(values):g}, and times and rates are above 0: give a count its unit"
        )
    if low is not None and high is not None and median is not None and not low <= median <= high:
        raise BadResult("its median is outside of its interval")
    identity = hash(
        (
            result.name,
            result.variant,
            result.metric,
            result.cache,
            result.device,
            result.shape,
            result.parameters,
            None if result.commit is None else result.commit.sha,
            result.occasion or result.created_at,
        )
    )
    if identity in identities:
        raise BadResult("there is another result of this name and these parameters")
    identities.add(identity)
    return result


def cleaned(text: object) -> str:
    """Shorten untrusted text, and replace unprintable characters by question marks; None: none."""
    shown = "".join(c if c.isprintable() else "?" for c in str("" if text is None else text))
    return shown if len(shown) <= _MAX_DETAIL_LENGTH else f"{shown[: _MAX_DETAIL_LENGTH - 3]}..."


def kept(value: object) -> Any:
    """Return what a user added to a result: JSON of at most 4 KiB, of more the beginning."""
    try:
        text = json.dumps(value, allow_nan=False, default=str)
    except (ValueError, RecursionError):
        return cleaned(value)
    return json.loads(text) if len(text) <= _MAX_KEPT and "\\u0000" not in text else cleaned(text)


def _shown(name: str) -> str:
    return cleaned(name)[:120]


def iso_time(text: object) -> str | None:
    """Convert an ISO 8601 time to UTC; None: it is no such time. A time without a zone is UTC."""
    return _in_utc(text) if isinstance(text, str) else None


@lru_cache(maxsize=1024)
def _in_utc(text: str) -> str | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    in_zone = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    try:
        return in_zone.astimezone(UTC).isoformat()
    except OverflowError:
        return None
