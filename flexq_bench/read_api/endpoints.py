"""Endpoints of the API, their parameters, and the OpenAPI document generated from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from flexq_bench.db.decisions import ALERT_STATES
from flexq_bench.db.engine import Session
from flexq_bench.db.nightly import NIGHT_STATES
from flexq_bench.db.records import TIME_METRICS
from flexq_bench.errors import UsageError
from flexq_bench.read_api import responses

OPENAPI = "3.1.0"
VERSION = "1.0.0"  # of the API; a breaking change increases the major version and /v1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. kind: str or int. least, most: bounds of an int. choices: empty: any text."""

    name: str
    description: str
    kind: type = str
    in_path: bool = False
    least: int = 0
    most: int = 2**31 - 1
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Parse and validate a value. Raises UsageError."""
        if self.kind is str:
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

    def described(self) -> dict[str, Any]:
        """Return the parameter object of the OpenAPI document."""
        schema: dict[str, Any] = {"type": "string"}
        if self.kind is int:
            schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        elif self.choices:
            schema["enum"] = list(self.choices)
        return {
            "name": self.name,
            "in": "path" if self.in_path else "query",
            "required": self.in_path,
            "description": self.description,
            "schema": schema,
        }


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A JSON endpoint. respond: a function of responses.py; response_type: its return type."""

    path: str
    name: str
    description: str
    respond: Callable[[Session, Mapping[str, Any]], Any]
    response_type: type
    parameters: tuple[Parameter, ...] = ()

    def read(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Parse the parameters of a request. Raises UsageError if one is unknown or invalid."""
        known = {parameter.name: parameter for parameter in self.parameters}
        unknown = sorted(set(query) - set(known))
        if unknown:
            names = ", ".join(known) or "none"
            raise UsageError(f"no parameter {unknown[0]!r:.60} here: there are {names}")
        return {name: known[name].read(text) for name, text in query.items()}


_LIMIT = Parameter("limit", "maximum number of rows", int, least=1, most=responses.MAX_LIMIT)
_OFFSET = Parameter("offset", "number of rows to skip", int)
_PAGE = (_LIMIT, _OFFSET)
_ID = Parameter("id", "id", int, in_path=True, least=1)
_UUID = Parameter("uuid", "uuid, or a prefix of it", in_path=True)
_SERIES = (
    Parameter("kernel", "name without variant"),
    Parameter("gpu", "SKU"),
    Parameter(
        "stage", "gemm: GEMM only; linear: including activation quantization; op: other operations"
    ),
    Parameter("operation", "name, as linear or attention_decode"),
    Parameter("m", "tokens of linear layers", int, least=1),
)
_STATES = ("open", "all", *ALERT_STATES[1:])

ENDPOINTS = (
    Endpoint(
        "/v1/status", "status", "overview of the database", responses.status, responses.Status
    ),
    Endpoint(
        "/v1/series", "listSeries", "all series", responses.series_list, responses.SeriesList,
        (*_SERIES, Parameter("variant", "variant of the kernel"),
         Parameter("parameters", "of the operation, as `batch=1 heads=32`"),
         Parameter("n", "output features", int, least=1),
         Parameter("k", "input features", int, least=1), *_PAGE),
    ),
    Endpoint(
        "/v1/series/{id}", "getSeries", "the history of a series, its newest results",
        responses.series_history, responses.SeriesHistory,
        (_ID, _LIMIT, Parameter("branch", "of the history; default: the main branch")),
    ),
    Endpoint(
        "/v1/alerts", "listAlerts", "alerts, newest first; by default the open ones",
        responses.alert_list, responses.AlertList,
        (Parameter("state", "open: all open states", choices=_STATES), *_PAGE),
    ),
    Endpoint(
        "/v1/alerts/{id}", "getAlert", "an alert with its verdicts and events",
        responses.alert_detail, responses.AlertDetail, (_ID,),
    ),
    Endpoint(
        "/v1/runs", "listRuns", "runs, newest first", responses.run_list, responses.RunList,
        (Parameter("suite", "name"), Parameter("status", "complete, running, …"),
         Parameter("gpu", "SKU"),
         Parameter("limit", "maximum number of rows", int, least=1, most=100)),
    ),
    Endpoint(
        "/v1/runs/{uuid}", "getRun", "a run, and its missing cases",
        responses.run_detail, responses.RunDetail, (_UUID,),
    ),
    Endpoint(
        "/v1/runs/{uuid}/results", "getRunResults", "all results of a run",
        responses.run_results, responses.ResultList, (_UUID, *_PAGE),
    ),
    Endpoint(
        "/v1/nights", "listNights", "nightly runs with their reports, latest first",
        responses.night_list, responses.NightList,
        (Parameter("name", "usually a date"), Parameter("suite", "name"),
         Parameter("gpu", "SKU"), Parameter("state", "of the night", choices=NIGHT_STATES), *_PAGE),
    ),
    Endpoint(
        "/v1/results/latest", "latestResults",
        "the newest accepted result of each series, of one regime and project; without sweeps by "
        "default",
        responses.latest_results, responses.ResultList,
        (*_SERIES, Parameter("suite", "only results of this suite"),
         Parameter("regime", "measurement regime", choices=tuple(TIME_METRICS)),
         Parameter("sweeps", "include one-off sweeps", choices=("yes",)), *_PAGE),
    ),
)  # fmt: skip

_BADGE = {
    "get": {
        "operationId": "getBadge",
        "summary": "a badge: the verdict of a branch or commit, for a README",
        "parameters": [
            Parameter(
                "of",
                "a branch (with --repository), or a commit by its sha or a prefix of at least 7 "
                "digits; default: the newest judged commit of the watched branch",
            ).described(),
            Parameter(
                "project",
                "the project of the commit; default: this repository, or the first project by name "
                "where it has no timed result",
            ).described(),
        ],
        "responses": {
            "200": {
                "description": "an SVG",
                "content": {"image/svg+xml": {"schema": {"type": "string"}}},
            },
            "304": {"description": "as the ETag of the request says"},
        },
    }
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas: dict[str, Any] = {
        "Error": {
            "type": "object",
            "properties": {"error": {"type": "string"}},
            "required": ["error"],
        }
    }
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        schema = TypeAdapter(endpoint.response_type).json_schema(
            mode="serialization", ref_template="#/components/schemas/{model}"
        )
        schemas |= schema.pop("$defs", {})
        schemas[endpoint.response_type.__name__] = schema
        paths[endpoint.path] = {"get": _operation(endpoint)}
    paths["/badge.svg"] = _BADGE
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "FlexQ Bench",
            "version": VERSION,
            "description": "Stored results, read-only. Times are in microseconds, moments in UTC.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    def response(description: str, name: str) -> dict[str, Any]:
        schema = {"$ref": f"#/components/schemas/{name}"}
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    return {
        "operationId": endpoint.name,
        "summary": endpoint.description,
        "parameters": [parameter.described() for parameter in endpoint.parameters],
        "responses": {
            "200": response(endpoint.description, endpoint.response_type.__name__),
            "304": {"description": "as the ETag of the request says"},
            "404": response("not stored", "Error"),
            "422": response("invalid parameter", "Error"),
            "503": response("the database can't be read", "Error"),
        },
    }
