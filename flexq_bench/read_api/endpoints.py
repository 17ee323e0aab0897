"""Endpoints of the API, their parameters, and the OpenAPI document generated from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from flexq_bench.db.decisions import ALERT_STATES
from flexq_bench.db.nightly import NIGHT_STATES
from flexq_bench.db.records import TIME_METRICS
from flexq_bench.errors import UsageError
from flexq_bench.read_api import badge, responses
from flexq_bench.read_api.problems import PROBLEM
from flexq_bench.read_api.responses import Source

OPENAPI = "3.1.0"
VERSION = "1.1.0"  # of the API; a breaking change increases the major version and /v1
JSON, SVG = "application/json", "image/svg+xml"
# Servers refuse addresses of more than 64 KiB: these are of fewer, if no letter is encoded.
_MAX_VALUES = 20  # of a repeated parameter
_MAX_TEXT = 200  # characters
_NO_CONTROLS = r"^[^\x00-\x1f\x7f]*$"
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. kind: str, int or datetime. least, most: bounds of an int.

    choices: empty: any text that the pattern matches. repeated: may occur several times; its value
    is then a tuple.
    """

    name: str
    description: str
    kind: type = str
    in_path: bool = False
    least: int = 0
    most: int = _MAX_INT
    choices: tuple[str, ...] = ()
    repeated: bool = False
    required: bool = False
    pattern: str = _NO_CONTROLS

    def read(self, texts: list[str]) -> Any:
        """Parse and validate the values of a request. Raises UsageError."""
        if not self.repeated and len(texts) > 1:
            raise UsageError(f"{self.name} is given {len(texts)} times: give it once")
        if len(texts) > _MAX_VALUES:
            raise UsageError(f"{self.name} is given {len(texts)} times: at most {_MAX_VALUES}")
        values = tuple(map(self._value, texts))
        return values if self.repeated else values[0]

    def _value(self, text: str) -> Any:
        if self.kind is datetime:
            return self._time(text)
        if self.kind is str:
            if len(text) > _MAX_TEXT or not re.fullmatch(_NO_CONTROLS, text):
                raise UsageError(
                    f"{self.name} has a control character or more than {_MAX_TEXT} characters"
                )
            if not re.fullmatch(self.pattern, text):
                raise UsageError(f"{self.name} is {text!r:.60}: give one like {self.pattern}")
            if self.choices and text not in self.choices:
                choices = ", ".join(self.choices)
                raise UsageError(f"{self.name} is {text!r:.60}: give one of {choices}")
            return text
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        if not self.least <= number <= self.most:
            raise UsageError(
                f"{self.name} is {text!r:.60}: give a whole number from {self.least} to {self.most}"
            )
        return number

    def _time(self, text: str) -> datetime:
        try:
            time = datetime.fromisoformat(text)
            if time.tzinfo is None:
                time = time.replace(tzinfo=UTC)
            if self.name == "until" and len(text) == len("2026-01-31"):
                time += timedelta(days=1, microseconds=-1)  # the whole day
            return time.astimezone(UTC)
        except (ValueError, OverflowError):
            raise UsageError(
                f"{self.name} is {text!r:.60}: give a time as 2026-01-31 or 2026-01-31T08:00:00Z"
            ) from None

    def described(self) -> dict[str, Any]:
        """Return the parameter object of the OpenAPI document."""
        schema: dict[str, Any]
        if self.kind is int:
            schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        elif self.kind is datetime:
            schema = {"type": "string", "anyOf": [{"format": "date-time"}, {"format": "date"}]}
        elif self.choices:
            schema = {"type": "string", "enum": list(self.choices)}
        else:
            schema = {"type": "string", "maxLength": _MAX_TEXT, "pattern": self.pattern}
            if self.in_path:
                schema = {"type": "string", "minLength": 1, "pattern": "^[0-9a-f-]+$"}
        if self.repeated:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": _MAX_VALUES}
        return {
            "name": self.name,
            "in": "path" if self.in_path else "query",
            "required": self.in_path or self.required,
            "description": self.description,
            "schema": schema,
        }


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint. respond: returns a value of response_type, which is str if it isn't JSON."""

    path: str
    name: str
    description: str
    respond: Callable[[Source, Mapping[str, Any]], Any]
    response_type: type
    parameters: tuple[Parameter, ...] = ()
    media_type: str = JSON

    def read(self, query: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Parse the parameters of a request. Raises UsageError if one is unknown or invalid."""
        return read_parameters(self.parameters, query)


def read_parameters(
    parameters: Sequence[Parameter], query: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Parse names and texts. Raises UsageError if one is unknown, missing or invalid."""
    known = {parameter.name: parameter for parameter in parameters}
    texts: dict[str, list[str]] = {}
    for name, text in query:
        texts.setdefault(name, []).append(text)
    unknown = sorted(set(texts) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise UsageError(f"no parameter {unknown[0]!r:.60} here: there are {names}")
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.required and parameter.name not in texts
    ]
    if missing:
        raise UsageError(f"give {missing[0]}")
    return {name: known[name].read(values) for name, values in texts.items()}


def _texts(name: str, description: str) -> Parameter:
    return Parameter(name, description, repeated=True)


def _numbers(name: str, description: str) -> Parameter:
    return Parameter(name, description, int, least=1, repeated=True)


_LIMIT = Parameter("limit", "maximum number of rows", int, least=1, most=responses.MAX_LIMIT)
_OFFSET = Parameter("offset", "number of rows to skip; `after` costs less", int)
_AFTER_ID = Parameter("after", "`next` of the previous page", int, least=1)
_AFTER = Parameter("after", "`next` of the previous page")
_ID = Parameter("id", "id", int, in_path=True, least=1)
_UUID = Parameter("uuid", "uuid, or a prefix of it", in_path=True)
_PROJECT = _texts("project", "name of an external project; empty: this repository")
_TIMES = (
    Parameter("since", "earliest time, inclusive", datetime),
    Parameter("until", "latest time, inclusive; a date is the whole day", datetime),
)
_KERNEL = _texts("kernel", "name without variant")
_GPU = _texts("gpu", "SKU")
_METRIC = _texts("metric", "as time or sustained_time")
_SERIES = (
    _KERNEL,
    _texts("variant", "variant of the kernel"),
    _GPU,
    _texts(
        "stage", "gemm: GEMM only; linear: including activation quantization; op: other operations"
    ),
    _texts("operation", "name, as linear or attention_decode"),
    _texts("parameters", "of the operation, as `batch=1 heads=32`"),
    _METRIC,
    _PROJECT,
    _numbers("m", "tokens of linear layers"),
    _numbers("n", "output features"),
    _numbers("k", "input features"),
)
_BADGE = (
    Parameter(
        "of",
        "a branch (with --repository), or a commit by its sha or a prefix of at least 7 digits; "
        "default: the newest judged commit of the watched branch",
    ),
    Parameter(
        "project",
        "the project of the commit; default: this repository, or the first project by name where "
        "it has no timed result",
    ),
)
_STATES = ("open", "all", *ALERT_STATES[1:])

ENDPOINTS = (
    Endpoint(
        "/v1/status", "status", "overview of the database", responses.status, responses.Status
    ),
    Endpoint(
        "/v1/series", "listSeries", "all series, by id", responses.series_list,
        responses.SeriesList, (*_SERIES, _LIMIT, _AFTER_ID, _OFFSET),
    ),
    Endpoint(
        "/v1/series/{id}", "getSeries", "the history of a series, its newest results",
        responses.series_history, responses.SeriesHistory,
        (_ID, _LIMIT, *_TIMES, Parameter("branch", "of the history; default: the main branch")),
    ),
    Endpoint(
        "/v1/alerts", "listAlerts", "alerts, newest first; by default the open ones",
        responses.alert_list, responses.AlertList,
        (Parameter("state", "open: all open states", choices=_STATES), _KERNEL, _GPU, _METRIC,
         _PROJECT, *_TIMES, _LIMIT, _AFTER_ID, _OFFSET),
    ),
    Endpoint(
        "/v1/alerts/{id}", "getAlert", "an alert with its events and a page of its verdicts",
        responses.alert_detail, responses.AlertDetail, (_ID, _LIMIT, _AFTER, _OFFSET),
    ),
    Endpoint(
        "/v1/runs", "listRuns", "runs, newest first", responses.run_list, responses.RunList,
        (_texts("suite", "name"), _texts("status", "complete, running, …"), _GPU, _PROJECT, *_TIMES,
         Parameter("limit", "maximum number of rows", int, least=1, most=100), _AFTER, _OFFSET),
    ),
    Endpoint(
        "/v1/runs/{uuid}", "getRun", "a run, and its missing cases",
        responses.run_detail, responses.RunDetail, (_UUID,),
    ),
    Endpoint(
        "/v1/runs/{uuid}/results", "getRunResults", "all results of a run",
        responses.run_results, responses.ResultList, (_UUID, *_SERIES, _LIMIT, _AFTER, _OFFSET),
    ),
    Endpoint(
        "/v1/nights", "listNights", "nightly runs with their reports, latest first",
        responses.night_list, responses.NightList,
        (_texts("name", "usually a date"), _texts("suite", "name"), _GPU, _PROJECT,
         Parameter("state", "of the night", choices=NIGHT_STATES, repeated=True), *_TIMES,
         _LIMIT, _AFTER, _OFFSET),
    ),
    Endpoint(
        "/v1/results/latest", "latestResults",
        "the newest accepted result of each series, by its id: of a regime, and of other tools. "
        "Without `project`: of this repository, or of the first project that was timed here, or of "
        "all. Without sweeps by default",
        responses.latest_results, responses.ResultList,
        (*_SERIES, _texts("suite", "only results of this suite"),
         Parameter("regime", "measurement regime", choices=tuple(TIME_METRICS)),
         Parameter("sweeps", "include one-off sweeps", choices=("yes",)), *_TIMES,
         _LIMIT, _AFTER_ID, _OFFSET),
    ),
    Endpoint(
        "/healthz", "getHealth", "status 200 while the database answers, else 503",
        responses.health, responses.Health,
    ),
    Endpoint(
        "/badge.svg", "getBadge", "a badge: the verdict of a branch or commit, for a README",
        badge.badge_svg, str,
        (*_BADGE, Parameter("style", "of the image", choices=badge.STYLES)), SVG,
    ),
    Endpoint(
        "/badge.json", "getShieldsBadge", "the same for an endpoint badge of shields.io",
        badge.badge_shields, badge.ShieldsBadge, _BADGE,
    ),
)  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas: dict[str, Any] = {
        "Problem": {
            "type": "object",
            "description": "RFC 9457. error: as detail, for readers of version 1.0.",
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "error": {"type": "string"},
            },
            "required": ["type", "title", "status", "detail", "error"],
        }
    }
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        schema = TypeAdapter(endpoint.response_type).json_schema(
            mode="serialization", ref_template="#/components/schemas/{model}"
        )
        schemas |= schema.pop("$defs", {})
        if endpoint.media_type == JSON:
            schemas[endpoint.response_type.__name__] = schema
        paths[endpoint.path] = {"get": _operation(endpoint)}
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "FlexQ Bench",
            "version": VERSION,
            "description": "Stored results, read-only. Times are in microseconds, moments in UTC. "
            "A repeated parameter selects rows with any of its values; in texts, * stands for any "
            "characters and ? for one. Pages: pass `next` as `after` until it is null.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    def response(description: str, schema: dict[str, Any], media_type: str) -> dict[str, Any]:
        return {"description": description, "content": {media_type: {"schema": schema}}}

    def named(name: str) -> dict[str, Any]:
        return {"$ref": f"#/components/schemas/{name}"}

    is_json = endpoint.media_type == JSON
    schema = named(endpoint.response_type.__name__) if is_json else {"type": "string"}
    return {
        "operationId": endpoint.name,
        "summary": endpoint.description,
        "parameters": [parameter.described() for parameter in endpoint.parameters],
        "responses": {
            "200": response(endpoint.description, schema, endpoint.media_type),
            "304": {"description": "as the ETag of the request says"},
            "404": response("not stored", named("Problem"), PROBLEM),
            "422": response("invalid parameter", named("Problem"), PROBLEM),
            "503": response("the database can't be read", named("Problem"), PROBLEM),
        },
    }
