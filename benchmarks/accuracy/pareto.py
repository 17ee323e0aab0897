"""Chart of a model's checkpoints: perplexity through kernels over tokens per second.

    python benchmarks/accuracy/pareto.py RECORDS... [--rows ROWS] --out FILE.png [--batch 1]
        [--across tokens-per-s|bits] [--text NAME] [--schemes NAME ...]

RECORDS are written by `flexq-bench db export FILE`, from results that `flexq-bench accuracy --model
MODEL --checkpoint FOLDER --through kernels` and `flexq-bench decode FOLDER` stored. ROWS are those
of benchmarks/accuracy/checkpoints.py, which contain the bits per weight. A point is one content
hash, as on the dashboard's Pareto page: its perplexity increase over fp16 on the same segments with
the 95 % interval, and its speed or size. A line connects the Pareto front; a vertical line is fp16,
if it was decoded under the same conditions. Prints the points, and those left out with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from checkpoints import read_rows
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dashboard.views.pareto.frame import Setting, front, pareto_frame, stored_checkpoints
from db import queries
from db.engine import open_database
from db.exchange import import_file
from db.queries import DecodeRow
from flexq_bench.accuracy import FULL_PRECISION, PERPLEXITY

SPEED, BITS = "tokens-per-s", "bits"
TITLES = {SPEED: "tokens/s", BITS: "bits a weight, scales included"}
INCREASE = "perplexity, increase over FP16"
SIZE_IN, DPI = (7.5, 4.2), 150
COLORS, MARKERS = 10, "osD^v<>"  # a marker for each ten schemes


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; exit code 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", help="files of db export")
    parser.add_argument("--rows", type=Path, help="rows of checkpoints.py, for bits")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg file")
    parser.add_argument("--across", choices=list(TITLES), default=SPEED)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--model", help="where the records are of several")
    parser.add_argument("--text", help="where the records are of several")
    parser.add_argument("--schemes", nargs="+", help="these alone")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        frame, dense, title = read(asked, f"{folder}/flexq.sqlite")
    if asked.across == BITS:
        if asked.rows is None:
            parser.error("--across bits needs --rows")
        frame["x"] = frame["checkpoint"].map(bits_by_hash(asked.rows))
        dense = None
    else:
        frame["x"] = 1000 * asked.batch / frame["token_ms"]
    if asked.schemes:
        frame = frame[frame["scheme"].isin(asked.schemes)]
    drawn = frame.dropna(subset=["x", "increase"]).sort_values("x")
    for row in frame.drop(drawn.index).to_dict("records"):
        why = row["missing"] or "no bits in ROWS"
        sys.stdout.write(f"left out: {row['scheme']} {row['checkpoint']}: {why}\n")
    if drawn.empty:
        sys.stdout.write("nothing to draw: decode the folders that were evaluated\n")
        return 1
    sys.stdout.write(drawn[["scheme", "checkpoint", "x", "increase", "low", "high"]].to_string())
    sys.stdout.write("\n")
    draw(asked.out, drawn, dense, title, asked.across)
    return 0


def read(asked: argparse.Namespace, database: str) -> tuple[pd.DataFrame, float | None, str]:
    """The Pareto page's rows of these records, tokens/s of fp16 if known, and a title."""
    with open_database(database) as opened:
        with opened.session() as session:
            for path in asked.records:
                import_file(session, path)
        with opened.session() as session:
            model = chosen("model", asked.model, sorted(queries.scored_models(session)))
            scores = [s for s in queries.model_scores(session, model) if s.metric == PERPLEXITY]
            text = chosen("text", asked.text, sorted({score.task for score in scores}))
            others = queries.latest_decodes(session)
        of_text = [score for score in scores if score.task == text]
        checkpoints, decodes = stored_checkpoints(opened, model, of_text)
    own = [row for row in decodes if row.batch == asked.batch and row.content_hash is not None]
    setting = Setting.of(own[-1]) if own else None
    frame = pareto_frame(checkpoints, own, setting)
    title = f"{model} on {text}"
    if setting is not None and asked.across == SPEED:
        title += (
            f", {setting.gpu}, batch {setting.batch}, {setting.prompt_tokens} tokens in, "
            f"{setting.new_tokens} out"
        )
    return frame, speed_of_dense(others, setting), title


def chosen(what: str, asked: str | None, there: Sequence[str]) -> str:
    """The one that was asked for, or the only one."""
    if asked is None and len(there) == 1:
        return there[0]
    if asked in there:
        return str(asked)
    raise SystemExit(f"--{what} {asked or ''}: the records are of {', '.join(there) or 'none'}")


def speed_of_dense(decodes: Sequence[DecodeRow], setting: Setting | None) -> float | None:
    """Tokens a second of fp16, decoded alike; None: it was not."""
    alike = [row for row in decodes if row.scheme == FULL_PRECISION and Setting.of(row) == setting]
    return 1000 * alike[-1].batch / alike[-1].token_ms if alike and alike[-1].token_ms else None


def bits_by_hash(path: Path) -> dict[str, float]:
    """Bits a weight by the first twelve digits of the content hash."""
    return {
        row["content_hash"][:12]: row["bits_per_weight"]
        for row in read_rows(path)
        if "content_hash" in row
    }


def draw(path: Path, drawn: pd.DataFrame, dense: float | None, title: str, across: str) -> None:
    """A point with its interval a row of columns x, increase, low, high, scheme; named beside.

    across: what x is, a key of TITLES.
    """
    figure = Figure(SIZE_IN, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    cost = drawn.assign(cost=-drawn["x"] if across == SPEED else drawn["x"])
    best = front(cost, "cost")
    axes.plot(best["x"], best["increase"], linestyle=":", linewidth=1, color="gray")
    worst_first = drawn.sort_values("increase", ascending=False).to_dict("records")
    for index, row in enumerate(worst_first):
        axes.errorbar(
            [row["x"]],
            [row["increase"]],
            yerr=[[row["increase"] - row["low"]], [row["high"] - row["increase"]]],
            fmt=MARKERS[index // COLORS],
            color=f"C{index % COLORS}",
            markersize=5,
            capsize=2,
            label=row["scheme"],
        )
    if dense is not None:
        axes.axvline(dense, color="black", linewidth=0.8, linestyle="--", label=FULL_PRECISION)
    figure.legend(loc="outside right upper", fontsize=7)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(min(0.0, drawn["low"].min()) - 0.2, max(1.0, 1.5 * drawn["high"].max()))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel(INCREASE)
    axes.set_xlabel(TITLES[across])
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
