"""Chart of a model's checkpoints: perplexity through kernels over tokens per second.

    python benchmarks/accuracy/pareto.py RECORDS... [--rows ROWS] --out FILE.png [--batch 1]
        [--across tokens-per-s|bits] [--speed-of MODEL] [--text NAME] [--schemes NAME ...]

RECORDS are written by `flexq-bench db export FILE`, from results that `flexq-bench accuracy --model
MODEL --checkpoint FOLDER --through kernels` and `flexq-bench decode FOLDER` stored. ROWS are those
of benchmarks/accuracy/checkpoints.py, which contain the bits per weight. A point is one content
hash, as on the dashboard's Pareto page: its perplexity increase over fp16 on the same segments with
the 95 % interval, and its speed or size. A line connects the Pareto front; a vertical line is fp16,
if it was decoded under the same conditions. Prints the points, and those left out with the reason.

--speed-of MODEL adds a second chart: the same perplexities over the speed of another model with
random weights under the same schemes, decoded under the same conditions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from checkpoints import read_rows
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexq_bench.accuracy.results import FULL_PRECISION, PERPLEXITY
from flexq_bench.dashboard.views.pareto.frame import (
    Setting,
    front,
    pareto_frame,
    stored_checkpoints,
)
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file
from flexq_bench.db.queries import SYNTHETIC, DecodeRow

SPEED, BITS = "tokens-per-s", "bits"
TITLES = {SPEED: "tokens/s", BITS: "bits a weight, scales included"}
INCREASE = "perplexity, increase over FP16"
SIZE_IN, DPI = (7.5, 4.2), 150
COLORS, MARKERS = 10, "osD^v<>"  # a marker for each ten schemes
FP16_CACHE = 16  # bits


@dataclass(frozen=True)
class Chart:
    """Points of one chart: columns scheme, checkpoint, x, increase, low and high; missing: why not.

    dense: x of the unquantized model. across: what x is, a key of TITLES.
    """

    points: pd.DataFrame
    dense: float | None
    title: str
    across: str

    @property
    def drawn(self) -> pd.DataFrame:
        """Points with both coordinates, by x."""
        return self.points.dropna(subset=["x", "increase"]).sort_values("x")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; exit code 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", help="files of db export")
    parser.add_argument("--rows", type=Path, help="rows of checkpoints.py, for bits")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg file")
    parser.add_argument("--across", choices=list(TITLES), default=SPEED)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--speed-of", metavar="MODEL", help="decoded with random weights")
    parser.add_argument("--model", help="where the records are of several")
    parser.add_argument("--text", help="where the records are of several")
    parser.add_argument("--schemes", nargs="+", help="these alone")
    options = parser.parse_args(arguments)
    if options.across == BITS and options.rows is None:
        parser.error("--across bits needs --rows")
    with tempfile.TemporaryDirectory() as folder:
        charts = read(options, f"{folder}/flexq.sqlite")
    for chart in charts:
        sys.stdout.write(f"{chart.title}\n")
        drawn = chart.drawn
        for row in chart.points.drop(drawn.index).to_dict("records"):
            why = row["missing"] or f"no {TITLES[chart.across]}"
            sys.stdout.write(f"left out: {row['scheme']} {row['checkpoint']}: {why}\n")
        if drawn.empty:
            sys.stdout.write("nothing to draw: decode the folders that were evaluated\n")
            return 1
        columns = ["scheme", "checkpoint", "x", "increase", "low", "high"]
        sys.stdout.write(f"{drawn[columns].to_string()}\n")
    draw(options.out, charts)
    return 0


def read(options: argparse.Namespace, database: str) -> list[Chart]:
    """Return the charts of these records: rows of the Pareto page."""
    with open_database(database) as opened:
        with opened.session() as session:
            for path in options.records:
                import_file(session, path)
        with opened.session() as session:
            model = chosen("model", options.model, sorted(queries.scored_models(session)))
            scores = [s for s in queries.model_scores(session, model) if s.metric == PERPLEXITY]
            text = chosen("text", options.text, sorted({score.task for score in scores}))
            others = queries.latest_decodes(session)
        of_text = [score for score in scores if score.task == text]
        checkpoints, decodes = stored_checkpoints(opened, model, of_text)
    own = [row for row in decodes if row.batch == options.batch and row.content_hash is not None]
    setting = Setting.of(own[-1]) if own else None
    points = pareto_frame(checkpoints, own, setting)
    if options.schemes:
        points = points[points["scheme"].isin(options.schemes)]
    title = f"{model} on {text}"
    if options.across == BITS:
        points["x"] = points["checkpoint"].map(bits_by_hash(options.rows))
        return [Chart(points, None, title, BITS)]
    points["x"] = 1000 * options.batch / points["token_ms"]
    alike = [row for row in others if Setting.of(row) == setting]
    real = speeds_of(row for row in alike if row.weights != SYNTHETIC)
    if setting is not None:
        title += (
            f", {setting.gpu}, batch {setting.batch}, {setting.prompt_tokens} tokens in, "
            f"{setting.new_tokens} out"
        )
    charts = [Chart(points, real.get(FULL_PRECISION), title, SPEED)]
    if options.speed_of is not None:
        named = (row for row in alike if row.model == options.speed_of and row.weights == SYNTHETIC)
        speeds = speeds_of(named)
        of_another = points.assign(x=points["scheme"].map(speeds), missing="not decoded")
        title = f"the same perplexities, speed of {options.speed_of} with random weights"
        charts.append(Chart(of_another, speeds.get(FULL_PRECISION), title, SPEED))
    return charts


def chosen(what: str, requested: str | None, there: Sequence[str]) -> str:
    """Return the requested value, or the only one there is."""
    if requested is None and len(there) == 1:
        return there[0]
    if requested in there:
        return str(requested)
    raise SystemExit(f"--{what} {requested or ''}: the records are of {', '.join(there) or 'none'}")


def speeds_of(decodes: Iterable[DecodeRow]) -> dict[str, float]:
    """Return tokens/s by scheme, with the cache of FP16."""
    return {
        row.scheme: 1000 * row.batch / row.token_ms
        for row in decodes
        if row.kv_bits == FP16_CACHE and row.token_ms
    }


def bits_by_hash(path: Path) -> dict[str, float]:
    """Bits a weight by the first twelve digits of the content hash."""
    return {
        row["content_hash"][:12]: row["bits_per_weight"]
        for row in read_rows(path)
        if "content_hash" in row
    }


def draw(path: Path, charts: Sequence[Chart]) -> None:
    """Draw the charts side by side, with one legend."""
    figure = Figure((SIZE_IN[0] + 4 * (len(charts) - 1), SIZE_IN[1]), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    every_scheme = pd.concat(chart.drawn for chart in charts).sort_values("increase")["scheme"]
    style = {scheme: index for index, scheme in enumerate(every_scheme[::-1].unique())}
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        draw_chart(axes, chart, style)
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="outside right upper", fontsize=7)
    figure.savefig(path)


def draw_chart(axes: Axes, chart: Chart, style: dict[str, int]) -> None:
    """Draw a point with its interval for each row. style: a number for each scheme."""
    drawn = chart.drawn
    cost = drawn.assign(cost=-drawn["x"] if chart.across == SPEED else drawn["x"])
    best = front(cost, "cost")
    axes.plot(best["x"], best["increase"], linestyle=":", linewidth=1, color="gray")
    for row in drawn.sort_values("increase", ascending=False).to_dict("records"):
        axes.errorbar(
            [row["x"]],
            [row["increase"]],
            yerr=[[row["increase"] - row["low"]], [row["high"] - row["increase"]]],
            fmt=MARKERS[style[row["scheme"]] // COLORS],
            color=f"C{style[row['scheme']] % COLORS}",
            markersize=5,
            capsize=2,
            label=row["scheme"],
        )
    if chart.dense is not None:
        axes.axvline(
            chart.dense, color="black", linewidth=0.8, linestyle="--", label=FULL_PRECISION
        )
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(min(0.0, drawn["low"].min()) - 0.2, max(1.0, 1.5 * drawn["high"].max()))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel(INCREASE)
    axes.set_xlabel(TITLES[chart.across])
    axes.set_title(chart.title, fontsize="small")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    sys.exit(main())
