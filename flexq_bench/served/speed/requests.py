"""Request traces: when requests arrive, and how long their prompts and answers are."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flexq_bench.decode.requests import drawn_requests
from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import text_lines
from flexq_bench.served.client import Request
from flexq_bench.workloads.names import unknown

Arrivals = Literal["closed", "constant", "poisson", "recorded"]
_WHAT = "a trace of requests: prompt,new or seconds,prompt,new a line, or JSON lines"
_MAX_BYTES = 1 << 28
_MAX_REQUESTS = 1_000_000
_MAX_TOKENS = 1 << 20
# Lengths of a request in JSON lines: ours, and those of Mooncake's published traces. Their time is
# in milliseconds.
_PROMPT = ("prompt_tokens", "input_length")
_NEW = ("new_tokens", "output_length")
# Frequent English words that common tokenizers have as one token, so lengths are about right.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "question", "work", "number", "night", "point", "home",
    "water", "room", "mother", "area", "money", "story", "fact", "month", "book", "eye", "job",
    "word", "business", "issue", "side", "kind", "head", "house", "friend", "father", "power",
    "hour", "game", "line", "end", "law", "car", "city", "name", "team", "minute", "idea", "body",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a trace. arrival_s: since the trace's start; 0 in a closed loop."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        lengths = (self.prompt_tokens, self.new_tokens)
        if (
            not all(1 <= length <= _MAX_TOKENS for length in lengths)
            or not 0 <= self.arrival_s < math.inf
        ):
            raise ValueError(f"a request has 1 to {_MAX_TOKENS:,} tokens, and no time before 0")


def fixed_lengths(count: int, prompt_tokens: int, new_tokens: int) -> list[PlannedRequest]:
    """Return requests that are all equal."""
    return [PlannedRequest(0.0, prompt_tokens, new_tokens)] * count


def sharegpt_lengths(count: int, longest: int, seed: int) -> list[PlannedRequest]:
    """Draw lengths like those of ShareGPT's conversations, as `decode` serves them.

    longest: tokens of prompt and answer together. The distribution and its source:
    flexq_bench.decode.requests.
    """
    drawn = drawn_requests(count, longest, seed)
    return [PlannedRequest(0.0, request.prompt_tokens, request.new_tokens) for request in drawn]


def read_trace(path: str) -> list[PlannedRequest]:
    """Read a recorded trace, sorted by arrival, with the first at 0.

    A CSV line is `prompt,new` or `seconds,prompt,new`; a JSON line has `prompt_tokens` and
    `new_tokens`, and perhaps `seconds`; or `input_length`, `output_length` and `timestamp` in
    milliseconds (Mooncake). A line of column names may come first. Raises UsageError with the
    number of an invalid line.
    """
    is_json = Path(path).suffix in (".jsonl", ".ndjson")
    requests: list[PlannedRequest] = []
    for number, line in enumerate(text_lines(path, _WHAT, most_bytes=_MAX_BYTES), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_of_object(json.loads(line)) if is_json else _of_row(line))
        except (ValueError, TypeError, KeyError, RecursionError, csv.Error):
            if number == 1 and not is_json and not any(map(str.isdigit, line)):
                continue  # names of columns
            raise UsageError(f"{path}:{number}: no request: name {_WHAT}") from None
        if len(requests) > _MAX_REQUESTS:
            raise UsageError(f"{path} has over {_MAX_REQUESTS:,} requests: cut it")
    if not requests:
        raise UsageError(f"{path} has no request: name {_WHAT}")
    requests.sort(key=lambda request: request.arrival_s)
    first = requests[0].arrival_s
    return [
        PlannedRequest(request.arrival_s - first, request.prompt_tokens, request.new_tokens)
        for request in requests
    ]


def with_arrivals(
    requests: Sequence[PlannedRequest],
    arrivals: Arrivals,
    rate_per_s: float,
    seed: int,
) -> list[PlannedRequest]:
    """Return requests with their arrivals.

    closed: each waits for an answer; constant, poisson: at this rate on average; recorded: as they
    are, from 0, at `rate_per_s` times the recorded speed. Raises UsageError for other arrivals, or
    a rate that is not positive.
    """
    if arrivals == "closed":
        times: Iterable[float] = [0.0] * len(requests)
    elif not rate_per_s > 0:
        raise UsageError(f"a rate must be above 0, got {rate_per_s}")
    elif arrivals == "constant":
        times = (place / rate_per_s for place in range(len(requests)))
    elif arrivals == "poisson":
        gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, len(requests))
        times = accumulate([0.0, *gaps[1:].tolist()])
    elif arrivals == "recorded":
        first = requests[0].arrival_s
        times = ((request.arrival_s - first) / rate_per_s for request in requests)
    else:
        raise UsageError(
            unknown("arrivals", arrivals, ("closed", "constant", "poisson", "recorded"))
        )
    return [
        PlannedRequest(time, request.prompt_tokens, request.new_tokens)
        for time, request in zip(times, requests, strict=True)
    ]


def request_of(planned: PlannedRequest, seed: int, number: int) -> Request:
    """Return the request to send: words by seed and number, so that no cache has its prompt."""
    generator = np.random.default_rng((seed, number))
    words = [_WORDS[i] for i in generator.integers(len(_WORDS), size=planned.prompt_tokens)]
    return Request(" ".join(words), planned.new_tokens, stream=True, fixed_length=True, seed=number)


def _of_row(line: str) -> PlannedRequest:
    (cells,) = csv.reader([line])
    *time, prompt, new = cells
    (seconds,) = map(float, time or ["0"])
    return PlannedRequest(seconds, int(prompt), int(new))


def _of_object(value: Mapping[str, Any]) -> PlannedRequest:
    prompt, new = (_whole(value, names) for names in (_PROMPT, _NEW))
    if "timestamp" in value:
        return PlannedRequest(float(value["timestamp"]) / 1000, prompt, new)
    return PlannedRequest(float(value.get("seconds", 0.0)), prompt, new)


def _whole(value: Mapping[str, Any], names: tuple[str, ...]) -> int:
    number = next((value[name] for name in names if name in value), None)
    if type(number) is not int:
        raise ValueError(f"{names[0]} is no whole number")
    return number
