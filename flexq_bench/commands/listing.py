"""`flexq-bench list`: what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from flexq_bench.commands.options import BackendChoice, BackendOption, DbOption, JsonFlag
from flexq_bench.commands.output import console, print_json
from flexq_bench.errors import UsageError
from workloads.names import unknown

if TYPE_CHECKING:
    from db.engine import Session

Row = dict[str, Any]


def list_(
    what: Annotated[str, typer.Argument(help="kernels, suites, models, devices, runs or series.")],
    backend: BackendOption = BackendChoice.AUTO,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Of runs, newest first.")] = 50,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the kernels, suites, models, devices, runs or series that there are.

    --backend narrows kernels; auto shows both. Devices are this machine's, then those with results.
    """
    sources: dict[str, Callable[[], list[Row]]] = {
        "kernels": lambda: _kernels(backend),
        "suites": _suites,
        "models": _models,
        "devices": lambda: _devices(db),
        "runs": lambda: _runs(db, limit),
        "series": lambda: _series(db),
    }
    if what not in sources:
        raise UsageError(unknown("list of", what, sources))
    rows = sources[what]()
    if as_json:
        print_json(rows)
        return
    out = console()
    if rows:
        out.print(_table(rows))
    else:
        out.print(f"no {what} yet: measure something first (flexq-bench run smoke)")


def _kernels(backend: BackendChoice) -> list[Row]:
    from kernels.registry import list_kernels

    return [
        {
            "kernel": spec.label,
            "backend": spec.backend,
            "weights": _format(spec.weight.bits, spec.weight.group),
            "activations": _format(spec.activation.bits, spec.activation.group),
            "stages": list(spec.stages),
            "capability": "" if spec.backend == "cpu" else "{}.{}".format(*spec.min_capability),
            "version": spec.version,
            "summary": spec.summary,
        }
        for name in ("cuda", "cpu")
        if backend in (BackendChoice.AUTO, BackendChoice(name))
        for spec in list_kernels("cuda" if name == "cuda" else "cpu")
    ]


def _format(bits: int, group: int | None) -> str:
    """`int6/128`: 6-bit integers with a scale per 128 of k; `int8/row`: one scale a row."""
    return f"fp{bits}" if bits > 8 else f"int{bits}/{'row' if group is None else group}"


def _suites() -> list[Row]:
    from workloads.suites import list_suites, load_suite

    return [
        {
            "suite": suite.name,
            "shapes": len(suite.shapes),
            "m": list(suite.m),
            "models": list(suite.models),
            "description": suite.description,
        }
        for suite in map(load_suite, list_suites())
    ]


def _models() -> list[Row]:
    from workloads.models import load_catalog

    return [
        {
            "model": model.name,
            "hidden": model.hidden,
            "ffn": model.ffn,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "vocab": model.vocab,
            "linear": {shape.name: f"{shape.n}x{shape.k}" for shape in model.linear_layers()},
        }
        for model in load_catalog().values()
    ]


def _devices(db: str | None) -> list[Row]:
    from flexq_bench.machine import local_devices

    here = [
        {
            "device": name,
            "sku": info.sku,
            "capability": info.compute_capability or "",
            "memory_gib": round((info.memory_bytes or 0) / 2**30, 1),
            "uuid": info.uuid,
        }
        for name, info in local_devices()
    ]
    skus = {row["sku"] for row in here}
    stored = [
        {"device": "stored", "sku": sku, "capability": "", "memory_gib": None, "uuid": ""}
        for sku in _stored_skus(db)
        if sku not in skus
    ]
    return [*here, *stored]


def _stored_skus(db: str | None) -> tuple[str, ...]:
    from db import queries

    with _stored(db) as session:
        return queries.filter_values(session).gpus if session else ()


@contextmanager
def _stored(db: str | None) -> Iterator[Session | None]:
    """A session that reads; None: nobody measured yet, and no database was asked for by name."""
    from db.engine import open_database
    from db.errors import MissingDatabaseError

    try:
        database = open_database(db, read_only=True)
    except MissingDatabaseError:
        if db is not None:
            raise
        yield None
        return
    with database, database.session() as session:
        yield session


def _runs(db: str | None, limit: int) -> list[Row]:
    from db import queries

    with _stored(db) as session:
        return [
            {
                "run": run.uuid,
                "suite": run.suite,
                "trigger": run.trigger,
                "status": run.status,
                "results": f"{run.received}/{run.planned}",
                "gpus": list(run.gpus),
                "commit": run.commit,
                "dirty": run.dirty,
                "created_at": run.created_at.isoformat(timespec="seconds"),
            }
            for run in (queries.runs(session, limit=limit) if session else ())
        ]


def _series(db: str | None) -> list[Row]:
    from db import queries

    with _stored(db) as session:
        return [asdict(series) for series in queries.list_series(session)] if session else []


# Columns of a series that tell it apart at a glance; --json has all of them.
_HIDDEN = {
    "kernel_version",
    "metric",
    "unit",
    "direction",
    "input_distribution",
    "protocol_version",
    "group",
    "weight_bits",
    "act_bits",
    "version",
    "linear",
}


def _table(rows: Sequence[Row]) -> Table:
    shown = [name for name in rows[0] if name not in _HIDDEN]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in shown:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        table.add_column(
            name.replace("_", " "), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in shown))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("run", "commit"):
        return str(value) if str(value).startswith("pkg-") else str(value)[:10]
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    return ", ".join(map(str, value))
