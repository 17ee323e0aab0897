"""`flexq-bench detect`: change points of a stored series, or of a CSV file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from flexq_bench.cli.options import MAX_ID, DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import UsageError

if TYPE_CHECKING:
    from flexq_bench.verdicts.change_points import ChangePoints
    from flexq_bench.verdicts.history_verdict import Metric


@dataclass(frozen=True, slots=True)
class _Source:
    """A series. labels: by name, one per value. warnings: that it may be no series."""

    name: str
    values: tuple[float, ...]
    labels: dict[str, Sequence[Any]]
    warnings: Sequence[str] = ()
    caveat: str = ""  # a limitation of changes in this series; empty: none
    metric: Metric | None = None  # of a series of the database; None: of a file
    breaks: Sequence[str] = ()  # where another series goes on, as the unit changed
    reruns: Sequence[Sequence[float]] = ()  # results that a value combines

    @property
    def is_stored(self) -> bool:
        return self.metric is not None


def detect(
    series: Annotated[
        int | None,
        typer.Argument(max=MAX_ID, help="Id of a series (flexq-bench list series)."),
    ] = None,
    csv: Annotated[
        str | None,
        typer.Option("--csv", metavar="FILE", help="File with one value per row."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            metavar="NAME",
            help="Column of the CSV. Default: the only one other than commit, time and device.",
        ),
    ] = None,
    smallest: Annotated[
        float | None,
        typer.Option(
            "--smallest",
            metavar="PERCENT",
            min=0.0,
            help="Smallest change, however large others are. Default: 1, and a share of the range.",
        ),
    ] = None,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show where the level of a series changed, and its other components.

    A level has at least three values. All values decide together, so an alert, which was decided as
    commits came, may differ. Levels may share a drift, and changes are beside it. Spells, after
    which the old level returned, are not changes; they are listed, like a change that is not
    decided yet. Differences between devices are not changes, if the CSV has a column device. The
    epochs of a stored series (one environment, between two acknowledged changes) are analysed
    separately. Indices count from 0. Empty values and NaN are gaps.
    """
    if column is not None and csv is None:
        raise UsageError(f"--column {column} is of a CSV: give --csv FILE, or leave it out")
    if csv is not None and series is None:
        _show(_from_csv(csv, column), smallest, as_json)
    elif series is not None and csv is None:
        _show(_from_database(series, db), smallest, as_json)
    else:
        raise UsageError("detect what? Give the id of a stored series, or --csv FILE")


def _from_csv(path: str, column: str | None) -> _Source:
    from flexq_bench.cli.csv_series import read_numbers, series_warnings

    numbers = read_numbers(path, column)
    labels: dict[str, Sequence[Any]] = {"row": numbers.rows, **numbers.labels}
    return _Source(path, numbers.values, labels, series_warnings(numbers))


def _from_database(series: int, db: str | None) -> _Source:
    from flexq_bench.results.series_breaks import series_breaks
    from flexq_bench.verdicts import history_verdict
    from flexq_bench.verdicts.commit_points import one_per_commit
    from flexq_bench.verdicts.history_verdict import Metric

    with open_database(db, read_only=True) as database, database.session() as session:
        points = one_per_commit(queries.series_history(session, series))
        if not points and series not in {row.id for row in queries.list_series(session)}:
            raise UsageError(f"no series {series}: flexq-bench list series shows those there are")
        projects = {row.id: row.project for row in queries.project_series(session)}
        named = next(row for row in queries.series_names(session) if row.id == series)
        breaks = [series_break.text for series_break in series_breaks(session, [series])]
    labels: dict[str, Sequence[Any]] = {
        "commit": [point.commit for point in points],
        "time": [point.created_at for point in points],
        "epoch": [point.epoch for point in points],
        "device": [point.device for point in points],
    }
    values = tuple(point.median_us for point in points)
    caveat = f"{projects[series]}'s: {history_verdict.CAVEAT}" if series in projects else ""
    metric = Metric(named.metric, named.unit, named.direction)
    reruns = [point.reruns for point in points]
    name = f"series {series}"
    return _Source(name, values, labels, (), caveat, metric, breaks, reruns)


def _show(source: _Source, smallest: float | None, as_json: bool) -> None:
    from flexq_bench.stats.level_model import usable_values
    from flexq_bench.stats.log_series import SMALLEST_CHANGE
    from flexq_bench.stats.newest_step import FEWEST_POINTS
    from flexq_bench.verdicts.change_points import Point, Scale, find_change_points
    from flexq_bench.verdicts.differences import FEWEST_OF_DIFFERENCES
    from flexq_bench.verdicts.history_verdict import change_text

    places = usable_values(source.values)[1]
    usable = places.size
    # A file's column of that name is a label, not an environment.
    labels: Sequence[Any] = source.labels["epoch"] if source.is_stored else [0] * len(source.values)
    epochs = _epochs(labels, places.tolist())
    if source.metric is not None:
        scale = source.metric.scale
    else:
        is_positive = all(source.values[place] > 0 for place in places.tolist())
        scale = Scale.RATIO if is_positive else Scale.DIFFERENCE
    is_ratio = scale is Scale.RATIO
    devices = source.labels.get("device", [None] * len(source.values))
    reruns = source.reruns or [()] * len(source.values)
    detected = find_change_points(
        [Point(*value) for value in zip(source.values, devices, labels, reruns, strict=True)],
        scale,
        smallest=_in_unit(smallest, source.values, is_ratio=is_ratio),
        in_hindsight=True,
    )
    device_changes = [
        {
            "index": change.index,
            "level_before": change.before,
            "level_after": change.after,
            "relative_change": change.relative_change,
        }
        for change in detected.model.device_changes
        if abs(change.relative_change) >= SMALLEST_CHANGE
    ]
    rows = [
        {
            "index": change.index,
            **{name: values[change.index] for name, values in source.labels.items()},
            "mean_before": change.before,
            "mean_after": change.after,
            **(
                {"relative_change": change.relative}
                if is_ratio or source.metric is None
                else {"change": change_text(change, source.metric)}
            ),
            "p_value": change.p_value,
        }
        for change in detected.steps
    ]
    fewest = FEWEST_POINTS if is_ratio else FEWEST_OF_DIFFERENCES
    enough = any(epoch["values"] >= fewest for epoch in epochs)
    if as_json:
        print_json(
            {
                "source": source.name,
                "values": len(source.values),
                "gaps": len(source.values) - usable,
                "enough": enough,
                "epochs": epochs,
                "change_points": rows,
                "waiting": asdict(detected.waiting[0].change) if detected.waiting else None,
                "drift": detected.model.drift,
                "devices_apart": detected.model.device_span,
                "device_changes": device_changes,
                "spells": [asdict(spell) for spell in detected.model.spells],
                "doubts": list(source.warnings),
                "caveat": source.caveat,
                "breaks": list(source.breaks),
            }
        )
        return
    out = console()
    if source.caveat:
        say(out, f"{source.name} is {source.caveat}")
    gaps = len(source.values) - usable
    counted = f"{source.name}: {usable} values" + (f" and {gaps} gaps" if gaps else "")
    if len(epochs) > 1:
        counted += f" in {len(epochs)} epochs"
    if not enough:
        each = " in one epoch" if len(epochs) > 1 else ""
        say(out, f"{counted}: too few to say, {fewest} are needed{each}")
    elif not rows:
        say(out, f"{counted}: no change point")
    else:
        say(out, f"{counted}: {len(rows)} change point{'s' if len(rows) > 1 else ''}")
        out.print(_table(rows))
    for epoch in epochs[1:]:
        few = "" if epoch["values"] >= fewest else f", {fewest} are needed"
        say(
            out,
            f"epoch {epoch['epoch']} begins at index {epoch['first']}, with another environment or "
            f"an acknowledged change; its levels are its own ({epoch['values']} values{few})",
        )
    for line in (*_describe(detected, device_changes), *source.warnings, *source.breaks):
        say(out, line)


def _in_unit(percent: float | None, values: Sequence[float], *, is_ratio: bool) -> float | None:
    """The smallest change as the service takes it; of differences, in percent of the median size.

    A change between equal levels is none, so 0 is allowed.
    """
    if percent is None or is_ratio:
        return None if percent is None else percent / 100
    return percent / 100 * statistics.median(abs(one) for one in values if math.isfinite(one))


def _epochs(labels: Sequence[Any], usable: Sequence[int]) -> list[dict[str, Any]]:
    """The epochs of a series by their first usable value; labels: [n] of each value."""
    counts: dict[Any, dict[str, Any]] = {}
    for index in usable:
        label = labels[index]
        epoch = counts.setdefault(label, {"epoch": label, "first": index, "values": 0})
        epoch["values"] += 1
    return list(counts.values())


def _describe(detected: ChangePoints, device_changes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Describe a series' components other than its change points."""
    for waiting in detected.waiting:
        yield (
            f"a change of {waiting.change.relative:+.2%} at index {waiting.change.index} waits: "
            f"{waiting.reason}"
        )
    if detected.model.drift:
        yield f"all levels drift by {detected.model.drift:+.1%} from the first value to the last"
    if detected.model.device_span:
        apart = f"{detected.model.device_span:.1%}"
        yield f"devices up to {apart} apart; levels are those on the newest one"
    for change in device_changes:
        yield (
            f"the device changed at index {change['index']}, and the level with it "
            f"({change['relative_change']:+.2%}): no device measured before and after, which would "
            "tell whether a commit did it"
        )
    for spell in detected.model.spells:
        yield f"a spell of {spell.change:+.1%} from index {spell.start} to {spell.stop - 1}"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        labelled = name in ("commit", "time")
        table.add_column(name.replace("_", " "), justify="left" if labelled else "right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    return table


def _cell(name: str, value: Any) -> str:
    if name == "commit":
        return str(value) if str(value).startswith("pkg-") else str(value)[:10]
    if name == "relative_change":
        return f"{value:+.2%}"
    if name == "p_value":
        return f"{value:.3f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
