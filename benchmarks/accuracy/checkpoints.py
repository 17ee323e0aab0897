"""Checkpoints of a model, one per scheme with a kernel: evaluated, decoded and compared.

    python benchmarks/accuracy/checkpoints.py --model DIR --data TEXT --calibration TEXT \\
        --out rows.jsonl [--schemes NAME ...] [--max-tokens N] [--starts N] [--share I/N] \\
        [--context N] [--new N] [--table]

Each scheme quantizes the model into a checkpoint. The script evaluates the checkpoint's perplexity
through the reference and through kernels, and decodes a prompt greedily with `decode`'s engine. It
counts the decoded tokens before the first one that differs

- from the tokens of the evaluated model, generated one by one with its cache (`equal`): the
  launches are the same, and so are the bits;
- from its predictions in one pass over the prompt and these tokens (`in one pass`): GEMMs of many
  tokens and another attention, with another order of summation. The row has the distance of the
  two largest logits at the first difference, in steps of FP16.

A JSON line for each scheme is appended to --out when it is measured; schemes in the file are not
measured again. --checkpoints DIR keeps quantized folders there, so that an interrupted call can be
repeated; with --seconds no scheme is started after that time. --table prints the file. Processes
next to each other take --share 1/4 to 4/4 of the starts, each with its own --out; the table of all
these rows in one file has one line per checkpoint.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy.as_decode import DecodedCache
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity, segments
from flexq_bench.accuracy.results import KERNELS, REFERENCE
from flexq_bench.accuracy.setup import best_device
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.checkpoints.config import device_kind
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.schemes import Calibration, calibration_segments, resolve
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.registry import layer_kernels
from flexq_bench.stats import mean_difference_interval

ORIGINAL = "fp16"
SCHEMES = (
    *("flexq-w6ax", "w6a6", "w6a8", "w4a16", "w8a16", "gptq-w4a16", "awq-w4a16"),
    *("smoothquant-w8a8", "abq-w6a6", "omniquant-w6a6", "fp6", "fp5"),
    *("dgq-w4a8[search=false]", "dgq-w4a8", "atom-w4a4[reorder=false]", "atom-w4a4"),
)


def measure(
    scheme: str, arguments: argparse.Namespace, calibration: Calibration | None, tokens: Any
) -> dict[str, Any]:
    """A row of the table: what one checkpoint is and does."""
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.checkpoints or Path(scratch)) / scheme
        row = {"scheme": scheme, **quantized(scheme, folder, arguments, calibration)}
        checkpoint = open_checkpoint(folder)
        for through in (REFERENCE, KERNELS):
            loaded = load_checkpoint(checkpoint, device=device, through=through)
            result = from_every_start(loaded.model, tokens, arguments)
            row[through] = result.perplexity
            row[f"{through}_nll"] = result.nll
            row[f"{through}_s"] = result.seconds
        prompt = next(segments(tokens, arguments.prompt))
        decoded = decode(CheckpointWeights(checkpoint), checkpoint.kv_bits, prompt, arguments)
        evaluated = greedy(loaded.model, prompt, arguments.new)
        forced, gaps = in_one_pass(loaded.model, prompt, decoded)
    once = equal_tokens(decoded, forced)
    return row | {
        "tokens": arguments.new,
        "equal_tokens": equal_tokens(decoded, evaluated),
        "equal_in_one_pass": once,
        "gap_steps": None if once == arguments.new else gaps[once],
        "device": device_kind(device),
    }


def from_every_start(model: Any, tokens: Any, arguments: argparse.Namespace) -> PerplexityResult:
    """The perplexity of a text that is cut into segments at `starts` places, equally far apart.

    Each cut gives a token another context, so other codes turn over: of the difference between two
    ways to compute one model, which is all that more starts are for, that is noise drawn anew.
    """
    first, every = (int(number) for number in arguments.share.split("/"))
    results = (
        perplexity(
            model,
            tokens[..., start * arguments.context // arguments.starts :],
            context=arguments.context,
            max_tokens=arguments.max_tokens,
        )
        for start in range(first - 1, arguments.starts, every)
    )
    return reduce(PerplexityResult.followed_by, results)


def quantized(
    scheme: str, folder: Path, arguments: argparse.Namespace, calibration: Calibration | None
) -> dict[str, Any]:
    """Return the hash, the bits per weight and the time of a scheme's checkpoint.

    Quantizes the model, unless a file with these notes is there.
    """
    notes = folder.with_name(f"{folder.name}.json")
    if notes.exists():
        return dict(json.loads(notes.read_text()))
    algorithm, device = resolve(scheme), torch.device(arguments.device)
    written = quantize_checkpoint(
        open_source(find_model(arguments.model)),
        algorithm,
        folder,
        calibration=calibration if algorithm.needs_calibration else None,
        device=device,
        dtype=torch.float16 if device.type == "cuda" else torch.float32,
    )
    row = {
        "content_hash": written.content_hash,
        "bits_per_weight": written.bits_per_weight,
        "quantize_s": written.seconds,
    }
    notes.write_text(json.dumps(row))
    return row


def decode(
    source: CheckpointWeights, kv_bits: int, prompt: Any, arguments: argparse.Namespace
) -> list[int]:
    """Greedy tokens of decode's engine."""
    device = torch.device(arguments.device)
    length = arguments.prompt + arguments.new
    model = load(source, device, length, lambda *_: None, (1,))
    operations = operations_on(device)
    engine = Engine(model, operations, lambda *_: None, slots=1, capacity=length, kv_bits=kv_bits)
    ids = prompt.int().to(device)[None]
    return [int(token) for token in engine.generate(ids, arguments.new).tokens[0]]


@torch.no_grad()
def greedy(model: Any, prompt: Any, new: int) -> list[int]:
    """Greedy tokens of an evaluated model, one after the other."""
    ids, tokens = prompt.to(model.device)[None], []
    cache = DecodedCache(capacity=len(prompt) + new)
    for _ in range(new):
        output = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        ids = output.logits.argmax(-1)
        tokens.append(int(ids))
    return tokens


@torch.no_grad()
def in_one_pass(model: Any, prompt: Any, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Return the model's prediction at each token after the prompt, from one pass over all.

    Also returns the margin of each prediction: steps of FP16 to the second likeliest token.
    """
    text = torch.cat([prompt, torch.tensor(tokens)]).to(model.device)[None]
    logits = model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    gaps = []
    for first, second in logits.topk(2).values.tolist():
        step = 2.0 ** (math.floor(math.log2(max(abs(first), 1.0))) - 10)
        gaps.append((first - second) / step)
    return logits.argmax(-1).tolist(), gaps


def equal_tokens(decoded: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(decoded, other, strict=True))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), len(decoded))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown. The interval is of the difference, 95 %, over the text's segments."""
    lines = [
        "| scheme | content hash | bits | reference | kernels | difference | 95 % | equal tokens "
        "| in one pass |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in together(rows):
        if row["no_kernel"]:
            continue
        once = str(row.get("equal_in_one_pass", ""))
        if once and row["gap_steps"] is not None:
            once += f", then {row['gap_steps']:.1f} steps apart"
        cells = (
            f"`{row['scheme']}`",
            f"`{row['content_hash'][:12]}`",
            f"{row['bits_per_weight']:.3f}",
            f"{row[REFERENCE]:.3f}",
            f"{row[KERNELS]:.3f}",
            f"{100 * (row[KERNELS] / row[REFERENCE] - 1):+.4f} %",
            interval(row),
            f"{row['equal_tokens']} of {row['tokens']}",
            once,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| `{row['scheme']}` | {row['no_kernel']} |" for row in rows if row["no_kernel"]]
    return lines


def together(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of a checkpoint's shares of starts: one row per checkpoint."""
    by_checkpoint: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row.get("content_hash", row["scheme"])
        first = by_checkpoint.setdefault(name, row)
        if first is row:
            continue
        by_checkpoint[name] = first = dict(first)
        for through in (REFERENCE, KERNELS):
            first[f"{through}_nll"] = [*first[f"{through}_nll"], *row[f"{through}_nll"]]
            first[through] = math.exp(statistics.fmean(first[f"{through}_nll"]))
    return list(by_checkpoint.values())


def interval(row: dict[str, Any]) -> str:
    """Interval of the difference in perplexity, in percent; empty: one segment has none."""
    if len(row[f"{KERNELS}_nll"]) < 2:
        return ""
    found = mean_difference_interval(row[f"{REFERENCE}_nll"], row[f"{KERNELS}_nll"], seed=0)
    low, high = (100 * math.expm1(end) for end in (found.low, found.high))
    return f"{low:+.4f} to {high:+.4f} %"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, gzipped or not; none if there is no file."""
    if not path.exists():
        return []
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def main(words: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--data", "--calibration"):
        parser.add_argument(name)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--segments", type=int, default=64, help="of the calibration")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--starts", type=int, default=1, help="places where the text is cut first")
    parser.add_argument("--share", default="1/1", help="of the starts: every N-th from the I-th on")
    parser.add_argument("--prompt", type=int, default=64, help="tokens that are decoded from")
    parser.add_argument("--new", type=int, default=128, help="tokens decoded")
    parser.add_argument("--checkpoints", type=Path, help="keep the folders, and use those there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no scheme later")
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print what the file holds")
    arguments = parser.parse_args(words)
    began = time.monotonic()
    if not arguments.table:
        device = torch.device(arguments.device)
        tokenizer = load_model(arguments.model, device=device).tokenizer
        tokens = tokenize(read_text(arguments.data), tokenizer)
        calibration = calibration_segments(
            tokenize(read_text(arguments.calibration), tokenizer),
            segments=arguments.segments,
            length=arguments.context,
        )
        measured = {row["scheme"] for row in read_rows(arguments.out)}
        for scheme in dict.fromkeys(arguments.schemes):
            if scheme in measured:
                continue
            if time.monotonic() - began > arguments.seconds:
                sys.stderr.write(f"{scheme}: left for the next call\n")
                continue
            layers = layer_kernels(resolve(scheme), gated=True)
            lacking = [layer for layer in layers if not layer.kernel]
            row = {"scheme": scheme, "no_kernel": lacking[0].reason if lacking else ""}
            if not lacking:
                row |= measure(scheme, arguments, calibration, tokens)
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            spent = time.monotonic() - began
            sys.stderr.write(f"{spent:.0f} s: {scheme}: {row['no_kernel'] or row[KERNELS]}\n")
    sys.stdout.write("\n".join(table(read_rows(arguments.out))) + "\n")


if __name__ == "__main__":
    main()
