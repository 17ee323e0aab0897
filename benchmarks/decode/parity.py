"""How far the logits of the kernels are from those of the same codes in torch, by model and scheme.

    python benchmarks/decode/parity.py --device cuda

Models and fake kernels are those of tests/decode: one that was trained, and random ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "decode"))

from decoders import an_engine, prompts, small_llama, small_opt, trained_llama

from kernels.decoder.cuda_operations import CudaOperations
from kernels.decoder.torch_operations import TorchOperations

_MODELS = {"trained": trained_llama, "llama": small_llama, "opt": small_opt}
_SCHEMES = (
    "flexq-w6ax,flexq-w6a8,abq-w6a6,smoothquant-w8a8,w8a16,w4a16,fp6-w6a16,dgq-w4a8,atom-w4a4"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schemes", default=_SCHEMES)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    operations = CudaOperations() if device.type == "cuda" else TorchOperations()
    ids = prompts(3, 100, device)
    _say("model", "scheme", "largest", "rms", "same token", "quantization, rms")
    for name, build in _MODELS.items():
        small = build(device)
        exact = an_engine(small, "fp16", operations).logits(ids).float()
        with torch.inference_mode():
            theirs = small.reference(ids.long()).logits.float()
        _compare(name, "fp16, transformers", exact, theirs, exact)
        for scheme in arguments.schemes.split(","):
            got = an_engine(small, scheme, operations).logits(ids).float()
            wanted = an_engine(small, scheme, operations, fake=True).logits(ids).float()
            _compare(name, scheme, got, wanted, exact)


def _compare(
    model: str, scheme: str, got: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor
) -> None:
    apart = got - wanted
    same = (got.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()
    largest, damage = float(apart.abs().max()), _rms(wanted - exact)
    _say(model, scheme, f"{largest:.4f}", f"{_rms(apart):.5f}", f"{same:.4f}", f"{damage:.4f}")


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _say(*cells: str) -> None:
    widths = (8, 19, 8, 8, 10, 17)
    line = " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
