"""Six-bit formats by KL divergence and perplexity over bits a weight: a table, and a chart a model.

    flexq-bench accuracy --model MODEL --data TEXT --schemes ... --json RECORDS
    python benchmarks/accuracy/six_bits.py RECORDS... [--out FILE.png]

RECORDS are the lines that `accuracy --json` writes. Bits are those of a code and its share of a
scale; a scale of a row is shared by --k values.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from output import say

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.formats.scales import SCALE_TYPES
from flexq_bench.schemes import resolve

KL, PERPLEXITY = "kl_divergence", "perplexity"
WIDTH_IN, HEIGHT_IN, DPI = 3.5, 5.0, 110  # of the panel of a model


def bits_of(number: NumberFormat, k: int) -> float:
    """Bits a weight, with its share of the scale of its group, or of its row of k values."""
    scale = torch.empty((), dtype=SCALE_TYPES[number.scale]).itemsize * 8
    return number.bits + scale / (number.group or k)


def read(paths: list[Path]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Value and standard error of each metric, by model and scheme."""
    rows: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            pair = record["value"], record["standard_error"]
            rows[record["model"], record["scheme"]][record["metric"]] = pair
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--k", type=int, default=4096)
    options = parser.parse_args()
    rows = {key: metrics for key, metrics in read(options.records).items() if KL in metrics}
    panels = list(dict.fromkeys(model for model, _ in rows))
    figure = Figure((len(panels) * WIDTH_IN, HEIGHT_IN), layout="constrained")
    colors: dict[str, int] = {}
    plots = figure.subplots(1, len(panels), squeeze=False)[0]
    say("| model | weights x activations | bits | KL, 10^-3 | perplexity |")
    say("| --- | --- | ---: | ---: | ---: |")
    for (model, scheme), metrics in rows.items():
        chosen = resolve(scheme).layer_formats("q_proj", gated=True)
        weight, activation = chosen.weight, chosen.activation
        bits, (kl, error) = bits_of(weight, options.k), metrics[KL]
        name = f"{weight.name} x {'mixed' if activation is None else activation.name}"
        name += " (down_proj in 8 bits)" if scheme == "flexq-w6ax" else ""
        say(
            f"| {model} | {name} | {bits:.3f} | {1e3 * kl:.2f} ± {1e3 * error:.2f} | "
            f"{metrics[PERPLEXITY][0]:.3f} |"
        )
        is_dense = activation is not None and activation.is_dense
        axes = plots[panels.index(model)]
        color = f"C{colors.setdefault(name, len(colors))}"
        axes.errorbar(bits, kl, error, fmt="o" if is_dense else "s", label=name, color=color)
        axes.set(title=model, yscale="log", xlabel="bits a weight, scales included")
    plots[0].set(ylabel="KL divergence, nats")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    if options.out:
        FigureCanvasAgg(figure)
        figure.savefig(options.out, dpi=DPI, bbox_inches="tight")


if __name__ == "__main__":
    main()
