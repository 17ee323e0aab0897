"""`flexq-bench list`: kernels, schemes, suites, models, devices, runs, series and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from flexq_bench.cli.external import KernelsFromOption, adopted, use_kernels_from
from flexq_bench.cli.options import (
    MAX_ID,
    BackendChoice,
    BackendOption,
    DbOption,
    JsonFlag,
    given_options,
)
from flexq_bench.cli.output import console, print_json, print_wrapped, say
from flexq_bench.db.errors import MissingDatabaseError
from flexq_bench.db.records import TIME_METRICS
from flexq_bench.db.urls import default_path, is_default, resolve_url
from flexq_bench.errors import UsageError
from flexq_bench.workloads.case import kernel_label, stored_case
from flexq_bench.workloads.models import load_catalog
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import check_pattern, matches

if TYPE_CHECKING:
    from flexq_bench.db.engine import Session
    from flexq_bench.db.queries import ModelResults, NoiseRow, RunSummary
    from flexq_bench.schemes.registry import LayerKernel

Row = dict[str, Any]

_LISTS_WITH = {  # lists to which each option applies
    "backend": ("kernels",),
    "every": ("kernels",),
    "kernel": ("series",),
    "model": ("series",),
    "gpu": ("series",),
    "limit": ("runs", "false-alarms"),
    "db": ("kernels", "devices", "runs", "series", "noise", "false-alarms"),
}


def list_(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="kernels, operations, schemes, suites, models, devices, runs, series, noise or "
            "false-alarms."
        ),
    ],
    backend: BackendOption = BackendChoice.AUTO,
    kernels_from: KernelsFromOption = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Kernels: list every label instead of one line per family."),
    ] = False,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Series: only these labels or globs: 'flexq*'."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Series: only the shapes of a model."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SKU", help="Series: only one kind of GPU.")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_ID, help="Runs and false-alarms: maximum number, newest first."
        ),
    ] = 50,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List kernels, operations, schemes, suites, models, devices, runs, series, noise, alarms.

    --backend selects kernels; auto shows both. Kernels are shown by family, with the best stored
    share of the floor on this machine's device. Many series are shown only with a filter.
    Devices are this machine's, then those with results.
    noise: of each series, from A/A comparisons; in --json as ln(head / base).
    With --kernels-from only the kernels of these sources are listed; with --all the others too.
    false-alarms: the rate of A/A comparisons with verdict slower or faster, over time.
    """

    use_kernels_from(kernels_from, only=True)
    sources: dict[str, Callable[[], list[Row]]] = {
        "kernels": lambda: _kernels(
            backend,
            adopted=bool(kernels_from),
            only=adopted().all_labels if kernels_from and not every else (),
        ),
        "schemes": _schemes,
        "operations": _operations,
        "suites": _suites,
        "models": _models,
        "devices": lambda: _devices(db),
        "runs": lambda: _runs(db, limit),
        "series": lambda: _series(db, kernel, model, gpu),
        "noise": lambda: _noise(db),
        "false-alarms": lambda: _false_alarms(db, limit),
    }
    if what not in sources:
        raise UsageError(unknown("list of", what, sources))
    for name, owners in _LISTS_WITH.items():
        if what not in owners and given_options(context, (name,)):
            option = "all" if name == "every" else name
            raise UsageError(f"--{option} is of list {' or '.join(owners)}: leave it out here")
    if db is not None:
        resolve_url(db)  # because not every list opens the database
    if what == "kernels" and not every and not as_json and not kernels_from:
        _show_families(backend, db)
        return
    rows = sources[what]()
    if as_json:
        print_json(rows)
        return
    out = console()
    if what == "series" and len(rows) > _MAX_SERIES and kernel is model is gpu is None:
        kernels, gpus = ({row[name] for row in rows} for name in ("kernel", "gpu"))
        out.print(
            f"{len(rows):,} series of {len(kernels)} kernels on {len(gpus)} kinds of device: "
            "narrow them with --kernel, --model or --gpu (--json has all)",
            soft_wrap=True,
        )
        return
    if rows:
        print_wrapped(out, _table(rows))
    else:
        first = _FIRST_STEPS.get(what, "measure something first (flexq-bench run smoke)")
        out.print(f"no {what} yet: {first}")


def _kernels(backend: BackendChoice, *, adopted: bool, only: Collection[str] = ()) -> list[Row]:
    """List kernels. adopted: with those of --kernels-from. only: labels to list; empty: all."""
    from flexq_bench.cli.kernel_rows import kernel_rows, stored_kernel_rows

    return [
        row
        for row in (kernel_rows() if adopted else stored_kernel_rows())
        if backend in (BackendChoice.AUTO, row["backend"]) and (not only or row["kernel"] in only)
    ]


def _schemes() -> list[Row]:
    """List schemes: algorithm, formats and kernel of each layer of LLaMA, and the KV cache."""
    from flexq_bench.schemes import named_schemes

    return [
        {
            "scheme": named.scheme.name,
            "algorithm": f"{named.summary} ({named.scheme.source})",
            "source": named.scheme.source,
            "formats": _by_layer(named.gated, lambda layer: layer.formats.name),
            "kernel": _by_layer(named.gated, lambda layer: layer.kernel or layer.reason),
            "kv_bits": named.scheme.kv_bits,
            "version": named.scheme.version,
            "needs_calibration": named.scheme.needs_calibration,
            "layers": {
                "gated": [_layer(layer) for layer in named.gated],
                "plain": [_layer(layer) for layer in named.plain],
            },
        }
        for named in named_schemes()
    ]


def _by_layer(layers: Sequence[LayerKernel], text: Callable[[LayerKernel], str]) -> str:
    """Format the value of most layers, then other values with the names of their layers."""
    most = max(layers, key=lambda layer: len(layer.kinds))
    rest = [f"{', '.join(layer.kinds)}: {text(layer)}" for layer in layers if layer is not most]
    return "; ".join([text(most), *rest])


def _layer(layer: LayerKernel) -> Row:
    activation = layer.formats.activation
    return {
        "kinds": list(layer.kinds),
        "weights": layer.formats.weight.name,
        "activations": None if activation is None else activation.name,
        "kernel": layer.kernel or None,
        "reason": layer.reason or None,
    }


def _suites() -> list[Row]:
    from flexq_bench.workloads.suites import list_suites, load_suite

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


def _operations() -> list[Row]:
    from flexq_bench.workloads.operation import operation, operation_names

    return [
        {
            "operation": definition.name,
            "parameters": {
                parameter.name: parameter.summary for parameter in definition.parameters
            },
            "axes": list(definition.axes),
            "inputs": {
                tensor.name: f"{tensor.number} [{', '.join(tensor.shape)}], {tensor.role}"
                for tensor in definition.inputs
            },
            "outputs": {
                tensor.name: f"{tensor.number} [{', '.join(tensor.shape)}]"
                for tensor in definition.outputs
            },
            "description": definition.summary,
        }
        for definition in map(operation, operation_names())
    ]


def _models() -> list[Row]:

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
    from flexq_bench.db import queries
    from flexq_bench.measure.local_devices import local_devices

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
    with _stored(db, optional=True) as session:
        stored_skus = queries.filter_values(session).gpus if session else ()
    stored = [
        {"device": "stored", "sku": sku, "capability": "", "memory_gib": None, "uuid": ""}
        for sku in stored_skus
        if sku not in skus
    ]
    return [*here, *stored]


@contextmanager
def _stored(db: str | None, *, optional: bool = False) -> Iterator[Session | None]:
    """Open a read-only session; None: the default database does not exist yet.

    optional: the data are not required, so a missing database of $FLEXQ_BENCH_DB is no error.
    """
    if is_default(db) and not default_path().exists():
        yield None  # without the import of SQLAlchemy
        return
    from flexq_bench.db.engine import open_database

    try:
        database = open_database(db, read_only=True)
    except MissingDatabaseError:
        if db is not None or not (optional or is_default(db)):
            raise
        yield None
        return
    with database, database.session() as session:
        yield session


def _runs(db: str | None, limit: int) -> list[Row]:
    from flexq_bench.db import queries

    with _stored(db) as session:
        if session is None:
            return []
        runs = queries.runs(session, limit=limit)
        models = queries.model_results(session, [run.uuid for run in runs])
    return [_run(run, models.get(run.uuid)) for run in runs]


def _run(run: RunSummary, of_models: ModelResults | None) -> Row:
    """Format a run. of_models: results of a run of `accuracy` or `decode`; None: there are none."""

    received = run.received + (of_models.count if of_models else 0)
    return {
        "run": run.uuid,
        "suite": run.suite,
        "trigger": run.trigger,
        "status": run.status,
        "results": f"{received}/{run.planned}" if run.planned else str(received),
        "gpus": sorted({*run.gpus, *(of_models.gpus if of_models else ())}),
        "commit": run.commit,
        "dirty": run.dirty,
        "created_at": run.created_at.isoformat(timespec="seconds"),
    }


def _series(db: str | None, kernel: str | None, model: str | None, gpu: str | None) -> list[Row]:
    from flexq_bench.db import queries

    if kernel is not None:
        check_pattern(kernel)
    filters = queries.Filters(models=(model,) if model else (), gpus=(gpu,) if gpu else ())
    with _stored(db) as session:
        stored = queries.list_series(session, filters) if session else ()
        if session and not stored:
            known = queries.filter_values(session)
            for kind, name, names in (
                ("model", model, sorted({*known.models, *load_catalog()})),
                ("kind of device", gpu, known.gpus),
            ):
                if name is not None and names and name not in names:
                    raise UsageError(unknown(kind, name, names))
    if kernel is None:
        return [asdict(series) for series in stored]
    labels = [kernel_label(series.kernel, series.variant) for series in stored]
    selected = [
        series for series, label in zip(stored, labels, strict=True) if matches(kernel, label)
    ]
    if stored and not selected:
        raise UsageError(unknown("series of kernel", kernel, sorted(set(labels))))
    return [asdict(series) for series in selected]


def _show_families(backend: BackendChoice, db: str | None) -> None:
    from flexq_bench.cli.kernel_families import kernel_families, lines_of

    out = console()
    for line in lines_of(kernel_families(_kernels(backend, adopted=False), _shares_of_floor(db))):
        say(out, line)
    say(out, "% floor: the best stored of this machine's device. --all: every label, its backend")


def _shares_of_floor(db: str | None) -> dict[str, float]:
    """The best share of the newest results of each label on this machine's first device."""
    from flexq_bench.db import queries
    from flexq_bench.measure.local_devices import local_devices

    (_, here), *_ = local_devices()
    best: dict[str, float] = {}
    with _stored(db, optional=True) as session:
        if session is None:
            return {}
        filters = queries.Filters(
            gpus=(here.sku,), stages=("gemm",), caches=("cold",), projects=("",)
        )
        for row in queries.latest_results(session, filters):
            label = kernel_label(row.kernel, row.variant)
            if row.pct_of_floor is not None:
                best[label] = max(best.get(label, 0.0), row.pct_of_floor)
    return best


def _noise(db: str | None) -> list[Row]:
    from flexq_bench.db import queries

    with _stored(db) as session:
        return [
            {
                "series_id": page.series_id,
                "case": _case_key(page),
                "gpu": page.gpu,
                "comparisons": page.comparisons,
                "block_sigma": page.block_sigma,
                "placement_sigma": page.placement_sigma,
                "comparison_sigma": page.comparison_sigma,
                "noise_floor": page.noise_floor,
                "smallest_step": page.smallest_step,
                "computed_at": _minute(page.computed_at),
            }
            for page in (queries.aa_calibration(session) if session else ())
        ]


def _case_key(page: NoiseRow) -> str:
    label = kernel_label(page.kernel, page.variant)
    return stored_case(label, page.stage, page.cache, page.operation, page.parameters)


def _false_alarms(db: str | None, limit: int) -> list[Row]:
    from flexq_bench.db import queries

    with _stored(db) as session:
        rows = queries.false_alarm_rates(session, limit=limit) if session else []
        return [
            asdict(row) | {"since": _minute(row.since), "until": _minute(row.until)} for row in rows
        ]


def _minute(moment: datetime) -> str:
    return moment.isoformat(timespec="minutes")


_COMPARE_WITH_ITSELF = (
    "compare a commit with itself first (flexq-bench gate perf --base HEAD --head HEAD)"
)
_FIRST_STEPS = {"noise": _COMPARE_WITH_ITSELF, "false-alarms": _COMPARE_WITH_ITSELF}
# Shown in percent: logarithms of ratios, and shares.
_LOG_RATIOS = {
    "block_sigma",
    "placement_sigma",
    "comparison_sigma",
    "noise_floor",
    "smallest_step",
}
_SHARES = {"rate", "low", "high", "confidence"}

_MAX_SERIES = 40  # shown without a filter
_HEADINGS = {"created_at": "created (UTC)", "kv_bits": "KV bits"}
_OF_METRIC = {"unit", "direction"}  # of times the same for all series
# Columns that tables leave out; --json has all.
_HIDDEN = {
    "kernel_version",
    *_OF_METRIC,
    "input_distribution",
    "protocol_version",
    "group",
    "weight_bits",
    "act_bits",
    "version",
    "linear",
    "computed_at",
    "needs_calibration",
    "source",
    "layers",
}


def _table(rows: Sequence[Row]) -> Table:
    has_times_only = all(row.get("metric", "time") in TIME_METRICS.values() for row in rows)
    hidden = _HIDDEN if has_times_only else _HIDDEN - _OF_METRIC
    shown = [name for name in rows[0] if name not in hidden]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in shown:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        heading = _HEADINGS.get(name, name.replace("_", " "))
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in shown))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _LOG_RATIOS:
        return f"{100 * math.expm1(value):.3g} %"
    if name in _SHARES:
        return f"{100 * value:.3g} %"
    if name == "created_at":
        return str(value).replace("T", " ").replace("+00:00", "")
    if name in ("run", "commit"):
        return str(value) if str(value).startswith("pkg-") else str(value)[:10]
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    return ", ".join(map(str, value))
