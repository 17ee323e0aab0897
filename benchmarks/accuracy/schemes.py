"""Perplexity of a model under every scheme, paired with the unquantized model: tables of docs.

    python benchmarks/accuracy/schemes.py run --model DIR --data WIKI --calibration C4 \\
        --out rows.jsonl --sets weights,activations [--schemes NAME ...] [--max-tokens N]
    python benchmarks/accuracy/schemes.py table --out rows.jsonl [more.jsonl.gz ...]
        [--base SCHEME] [--schemes NAME ...] [--atom]

`run` appends a JSON line for each scheme when it is measured, and skips schemes in the file, so it
can be interrupted and restarted; --seconds ends it between two schemes. `table` prints Markdown:
perplexity, and its difference to the unquantized model's, or to that of --base, with a 95 %
interval over the same segments. --atom adds Atom's steps, which are otherwise left out.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from output import say

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.checkpoints.config import device_kind
from flexq_bench.schemes import calibration_segments, resolve
from flexq_bench.stats.paired import is_clear, mean_difference_interval

ORIGINAL = "original"
FULL = "float32"
_PLAIN = "activation_clip=1,weight_clip=1,gptq=false,kv_bits=16"
ATOM_STEPS = {  # Table 4 of arXiv 2310.19102, from rounding to nearest to all of Atom
    f"atom-w4a4[outliers=false,group=none,{_PLAIN}]": "W4A4, one scale a row, as it comes",
    f"atom-w4a4[outliers=false,{_PLAIN}]": "and groups of 128",
    f"atom-w4a4[{_PLAIN}]": "and the last group in INT8, outliers sorted into it",
    "atom-w4a4[gptq=false,kv_bits=16]": "and clipping",
    "atom-w4a4[kv_bits=16]": "and GPTQ",
    "atom-w4a4": "and keys and values in 4 bits",
}
SETS = {
    "rounding": (
        "flexq-w6ax",
        "flexq-w6ax[a8_budget=0.25]",
        "w6a16",
        "w6a8",
        "w6a6",
        "rtn-w6a8",
        "rtn-w6a6",
        "rtn-w4a16",
        "w4a16",
        "w4a4",
    ),
    "weights": (
        *("fp6", "fp6[group=128]", "fp6[gptq=true]", "fp5", "fp5[group=128]", "fp5[gptq=true]"),
        *("fp6[group=128,gptq=true]", "fp5[group=128,gptq=true]"),
        *("gptq-w4a16", "gptq-w3a16", "awq-w4a16", "awq-w3a16", "w3a16"),
        *("gptq-w4a16[group=none]", "awq-w4a16[group=none]"),
    ),
    "activations": (
        *("smoothquant-w8a8", "smoothquant-w6a6", "smoothquant-w6a6[alpha=none]"),
        "smoothquant-w6a6[group=128]",
    ),
    "dgq": (
        *("dgq-w4a8", "dgq-w4a8[search=false]", "dgq-w4a8[static=true]", "dgq-w4a8[outliers=0]"),
        "dgq-w4a8[static=true,outliers=0]",
    ),
    "atom": tuple(ATOM_STEPS),
    "learned": (
        *("omniquant-w6a6", "abq-w6a6", "omniquant-w4a4", "abq-w4a4", "abq-w2a8", "abq-w2*a8"),
    ),
}


def run(arguments: argparse.Namespace) -> None:
    """Measure every scheme that the file lacks."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(arguments.model, device=device, dtype=arguments.dtype)
    tokenizer = loaded.tokenizer
    tokens = tokenize(read_text(arguments.data), tokenizer)
    calibration = calibration_segments(
        tokenize(read_text(arguments.calibration), tokenizer),
        segments=arguments.segments,
        length=arguments.length,
    )
    chosen = arguments.schemes + [name for part in arguments.sets for name in SETS[part]]
    measured = {row["scheme"] for row in read_rows([arguments.out])}
    for name in dict.fromkeys((ORIGINAL, *(f"{n}{arguments.suffix}" for n in chosen))):
        if name in measured:
            continue
        if time.monotonic() - began > arguments.seconds:
            sys.exit("time is up; run again for the rest")
        model = copy.deepcopy(loaded.model)
        started = time.monotonic()
        if name != ORIGINAL:
            resolve(name).quantize(model, calibration)
        quantized = time.monotonic() - started
        result = perplexity(
            model, tokens, context=arguments.context, max_tokens=arguments.max_tokens
        )
        row = {
            "scheme": name,
            "nll": result.nll,
            "context": result.context,
            "quantize_s": round(quantized, 1),
            "tokens_per_s": round(result.tokens_per_s),
            "segments": arguments.segments,
            "length": arguments.length,
            "dtype": loaded.dtype,
            "device": device_kind(device),
        }
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(f"{name}: {result.perplexity:.3f}, {quantized:.0f} s, {result.seconds:.0f} s")


def table(arguments: argparse.Namespace) -> None:
    """Print the rows in their order, each with the original (or --base) of its data type."""
    rows = read_rows(arguments.out)
    base = {dtype_of(row): row for row in rows if row["scheme"] == arguments.base}
    half = {row["scheme"] for row in rows if dtype_of(row) != FULL}
    than = ORIGINAL if arguments.base == ORIGINAL else f"`{arguments.base}`"
    what = "step" if arguments.atom else "scheme"
    say(f"| {what} | perplexity | more than {than} | 95 % interval | s to quantize |")
    say("| --- | ---: | ---: | --- | ---: |")
    for row in rows:
        name = row["scheme"]
        wanted = (
            name in arguments.schemes
            if arguments.schemes
            else name in ATOM_STEPS
            if arguments.atom
            else name not in list(ATOM_STEPS)[:-1]
        )
        if wanted and (dtype_of(row) != FULL or name not in half) and dtype_of(row) in base:
            title = ATOM_STEPS[name] if arguments.atom else f"`{name}`"
            if dtype_of(row) == FULL and half:
                title += " (FP32)"
            say(f"| {' | '.join(cells(title, row, base[dtype_of(row)]))} |")


def cells(name: str, row: dict[str, Any], base: dict[str, Any]) -> Sequence[str]:
    """A row of the table. The interval is of the difference in nats, shown as perplexity."""
    found, own = (math.exp(math.fsum(r["nll"]) / len(r["nll"])) for r in (row, base))
    cost = f"{row['quantize_s']:.0f}"
    if row is base:
        return (name, f"{found:.2f}", "", "", cost)
    interval = mean_difference_interval(base["nll"], row["nll"], seed=0)
    low, high = (own * math.expm1(end) for end in (interval.low, interval.high))
    unclear = "" if is_clear(interval) else ", not clear"
    return (name, f"{found:.2f}", f"{found - own:+.2f}", f"{low:+.2f} … {high:+.2f}{unclear}", cost)


def dtype_of(row: dict[str, Any]) -> str:
    """Data type of the model's weights; old rows have none and are FP32."""
    return str(row.get("dtype", FULL))


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of files, none of one that isn't there yet; of a scheme measured twice the last."""
    texts = (
        gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for path in paths
        if path.exists()
    )
    rows = (json.loads(line) for text in texts for line in text.splitlines())
    return list({(row["scheme"], dtype_of(row)): row for row in rows}.values())


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    measure = verbs.add_parser("run")
    measure.set_defaults(action=run)
    for name in ("--model", "--data", "--calibration"):
        measure.add_argument(name, required=True)
    measure.add_argument("--schemes", nargs="*", default=[])
    measure.add_argument("--sets", type=lambda text: text.split(","), default=[])
    measure.add_argument("--suffix", default="", help="options for all, such as [epochs=4]")
    measure.add_argument("--segments", type=int, default=128)
    measure.add_argument("--length", type=int, default=2048)
    measure.add_argument("--context", type=int, default=2048)
    measure.add_argument("--max-tokens", type=int)
    measure.add_argument("--dtype", help="of the weights; default: float16 on a GPU, else float32")
    measure.add_argument("--seconds", type=float, default=math.inf)
    show = verbs.add_parser("table")
    show.set_defaults(action=table)
    measure.add_argument("--out", type=Path, required=True)
    show.add_argument("--out", type=Path, required=True, nargs="+")
    show.add_argument("--base", default=ORIGINAL, help="scheme that the others are compared with")
    show.add_argument("--schemes", nargs="*", default=[], help="only these")
    show.add_argument("--atom", action="store_true", help="the steps of its Table 4")
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
