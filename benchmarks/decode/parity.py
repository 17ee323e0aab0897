"""Difference of the kernels' logits from those of the same codes in torch, by model and scheme.

    python benchmarks/decode/parity.py --device cuda

Models and the torch replacements of kernels are those of tests/decode: one trained model, and
random ones, rounded to nearest in the formats of a scheme. Each line has the largest difference of
a logit and the share of positions with the same token, compared with sums in float64 (`free`), and
with sums that follow the kernel if FP32 may round either way (`alike`). It also has the number of
sums, of those so close to the middle between two FP16 numbers that FP32 may round either way
(`near`), of those that the kernel rounded the other way (`moved`), and of those that equal neither
number, which is an error of the kernel (`astray`). --by-layer prints these counts for each layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "decode"))

from decoders import (
    FakeQuantized,
    RoundedAlike,
    Small,
    an_engine,
    prompts,
    small_llama,
    small_opt,
    trained_llama,
)
from json_lines import say

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.decoder import DecoderOperations
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.torch_operations import TorchOperations

_MODELS = {"trained": trained_llama, "llama": small_llama, "opt": small_opt}
_SCHEMES = "flexq-w6ax,w6a8,abq-w6a6,smoothquant-w8a8,w8a16,w4a16,fp6,dgq-w4a8,atom-w4a4"
_HEADS = ("model", "prompts", "scheme", "free", "token", "alike", "token")
_COUNTS = ("sums", "near", "moved", "astray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schemes", default=_SCHEMES)
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--prompts", default="3x100", help="sequences x tokens of each")
    parser.add_argument("--by-layer", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    operations = CudaOperations() if device.type == "cuda" else TorchOperations()
    _say(*_HEADS, *_COUNTS, "quantization, rms")
    for name in arguments.models.split(","):
        small = _MODELS[name](device)
        for text in arguments.prompts.split(","):
            sequences, length = (int(size) for size in text.split("x"))
            ids = prompts(sequences, length, device)
            exact = an_engine(small, "fp16", operations, slots=sequences).logits(ids).float()
            for scheme in arguments.schemes.split(","):
                made = _compare((name, text, scheme), small, operations, ids, exact)
                if arguments.by_layer:
                    _layers(made)


def _compare(
    names: tuple[str, ...],
    small: Small,
    operations: DecoderOperations,
    ids: torch.Tensor,
    exact: torch.Tensor,
) -> list[RoundedAlike]:
    """Says the line of a scheme, and returns what stood for the kernel of each layer."""
    made: list[RoundedAlike] = []

    def rounded_alike(kernel: LinearKernel) -> LinearKernel:
        made.append(RoundedAlike(kernel))
        return made[-1]

    def logits(instead: Callable[[LinearKernel], LinearKernel]) -> torch.Tensor:
        engine = an_engine(small, names[-1], operations, slots=ids.shape[0], instead=instead)
        return engine.logits(ids).float()

    got, free, alike = logits(lambda kernel: kernel), logits(FakeQuantized), logits(rounded_alike)
    counts = (str(sum(getattr(kernel, name) for kernel in made)) for name in _COUNTS)
    damage = f"{float((free - exact).square().mean().sqrt()):.4f}"
    _say(*names, *_apart(got, free), *_apart(got, alike), *counts, damage)
    return made


def _layers(made: list[RoundedAlike]) -> None:
    for index, kernel in enumerate(made):
        of_block = "qkv_proj", "o_proj", "gate_up_proj", "down_proj"
        block, layer = f"block {index // 4}", of_block[index % 4]
        if kernel is made[-1]:
            block, layer = "", "lm_head"
        counts = (str(getattr(kernel, name)) for name in _COUNTS)
        _say("", block, layer, *[""] * 4, *counts, "")


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> tuple[str, str]:
    same = (got.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()
    return f"{float((got - wanted).abs().max()):.4f}", f"{float(same):.4f}"


def _say(*cells: str) -> None:
    widths = (8, 8, 17, 8, 7, 8, 7, 8, 6, 6, 7, 17)
    line = " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    say(line.rstrip())


if __name__ == "__main__":
    main()
