"""One checkpoint of a model for each scheme with a kernel: judged, decoded and compared.

    python benchmarks/accuracy/checkpoints.py --model DIR --data TEXT --calibration TEXT \\
        --out rows.jsonl [--schemes NAME ...] [--max-tokens N] [--context N] [--new N] [--table]

Each scheme quantizes the model into a checkpoint. Of its bytes the script measures the perplexity
through the reference and through kernels, and decodes a prompt greedily twice: with `decode`'s
engine, and with the model that accuracy evaluates through kernels, held in FP16. Where their tokens
differ first, it shows how far apart the two likeliest logits of that model are there, in steps of
FP16. A JSON line for each scheme is added to --out as soon as it is measured, and those that are
there are not measured again. --table prints what the files hold.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy import load_model, read_text, tokenize
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.perplexity import perplexity, segments
from flexq_bench.accuracy.results import KERNELS, REFERENCE
from flexq_bench.accuracy.setup import best_device
from flexq_bench.checkpoints import open_checkpoint
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load
from flexq_bench.schemes import Calibration, calibration_segments, resolve
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.registry import layer_kernels
from kernels.decoder.cuda_operations import CudaOperations
from kernels.decoder.torch_operations import TorchOperations

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
    algorithm = resolve(scheme)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        written = quantize_checkpoint(
            open_source(find_model(arguments.model)),
            algorithm,
            folder,
            calibration=calibration if algorithm.needs_calibration else None,
            device=device,
            dtype=torch.float16 if device.type == "cuda" else torch.float32,
        )
        row: dict[str, Any] = {
            "scheme": scheme,
            "content_hash": written.content_hash,
            "bits_per_weight": written.bits_per_weight,
            "quantize_s": written.seconds,
        }
        checkpoint = open_checkpoint(folder)
        for through in (REFERENCE, KERNELS):
            loaded = load_checkpoint(checkpoint, device=device, through=through)
            result = perplexity(
                loaded.model, tokens, context=arguments.context, max_tokens=arguments.max_tokens
            )
            row[through] = result.perplexity
            row[f"{through}_nll"] = result.nll
        halves = load_checkpoint(checkpoint, device=device, through=KERNELS, dtype="float16")
        prompt = next(segments(tokens, arguments.prompt))
        decoded = decode(CheckpointWeights(checkpoint), checkpoint.kv_bits, prompt, arguments)
        evaluated, gaps = greedy(halves.model, prompt, arguments.new)
    same = [ours == theirs for ours, theirs in zip(decoded, evaluated, strict=True)]
    first = next((index for index, equal in enumerate(same) if not equal), None)
    return row | {
        "tokens": arguments.new,
        "equal_tokens": sum(same) if first is None else first,
        "gap_steps": None if first is None else gaps[first],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def decode(
    source: CheckpointWeights, kv_bits: int, prompt: Any, arguments: argparse.Namespace
) -> list[int]:
    """Greedy tokens of decode's engine."""
    device = torch.device(arguments.device)
    length = arguments.prompt + arguments.new
    model = load(source, device, length, lambda *_: None, (1,))
    operations = CudaOperations() if device.type == "cuda" else TorchOperations()
    engine = Engine(model, operations, lambda *_: None, slots=1, capacity=length, kv_bits=kv_bits)
    ids = prompt.int().to(device)[None]
    return [int(token) for token in engine.generate(ids, arguments.new).tokens[0]]


@torch.no_grad()
def greedy(model: Any, prompt: Any, new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of a model of transformers, and how sure each is: FP16 steps to the second."""
    ids = prompt.to(next(model.parameters()).device)[None]
    cache, tokens, gaps = None, [], []
    for _ in range(new):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        top = output.logits[0, -1].float().topk(2).values
        step = 2.0 ** (math.floor(math.log2(max(abs(float(top[0])), 1.0))) - 10)
        gaps.append(float(top[0] - top[1]) / step)
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens, gaps


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "| scheme | content hash | bits | reference | kernels | difference | tokens equal |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["no_kernel"]:
            continue
        difference = 100 * (row[KERNELS] / row[REFERENCE] - 1)
        equal = f"{row['equal_tokens']} of {row['tokens']}"
        if row["gap_steps"] is not None:
            equal += f", then {row['gap_steps']:.1f} steps apart"
        cells = (
            f"`{row['scheme']}`",
            f"`{row['content_hash'][:12]}`",
            f"{row['bits_per_weight']:.3f}",
            f"{row[REFERENCE]:.3f}",
            f"{row[KERNELS]:.3f}",
            f"{difference:+.4f} %",
            equal,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| `{row['scheme']}` | {row['no_kernel']} |" for row in rows if row["no_kernel"]]
    return lines


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
    parser.add_argument("--prompt", type=int, default=64, help="tokens that are decoded from")
    parser.add_argument("--new", type=int, default=128, help="tokens decoded")
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print what the file holds")
    arguments = parser.parse_args(words)
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
            lacking = [one for one in layer_kernels(resolve(scheme), gated=True) if not one.kernel]
            row = {"scheme": scheme, "no_kernel": lacking[0].reason if lacking else ""}
            if not lacking:
                row |= measure(scheme, arguments, calibration, tokens)
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            sys.stderr.write(f"{scheme}: {row['no_kernel'] or row[KERNELS]}\n")
    sys.stdout.write("\n".join(table(read_rows(arguments.out))) + "\n")


if __name__ == "__main__":
    main()
