"""Perplexity difference between kernels and the reference that is caused by rounding alone.

    python benchmarks/accuracy/code_flips.py (--model DIR [--format fp8/row] | --checkpoint DIR)
        --data FILE [--draws 8] [--context 256] [--max-tokens 7700]

Weights and activations of a model are rounded to one format, those of a checkpoint as its scheme
does. If an input of a layer is close to the boundary between two codes, a difference in its last
FP16 bit changes the code, which is a large step in formats of few bits. The reference is therefore
computed repeatedly with each layer's input changed by at most 2^-11 of its value, with one seed per
draw. The loss through kernels is compared with the spread of these draws: with kernels in the
linear layers only, and with decode's whole forward pass.
Prints one JSON object with losses in percent of the perplexity. Exit code 1: kernels differ from
the mean of the draws by more than three of their standard deviations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexq_bench.accuracy.as_decode import ModelWeights, compute_as_decode, decoded_architecture
from flexq_bench.accuracy.bos import chosen_bos, text_tokens
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.results import REFERENCE
from flexq_bench.accuracy.setup import best_device
from flexq_bench.accuracy.texts import read_text
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.kernel_linear import through_kernels
from flexq_bench.decode.quantized_cache import FULL_KV_BITS
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.uniform import round_to

_LAST_BIT = 2**-11  # of FP16, relative
Losses = NDArray[np.float64]


def jittered(model: Any, seed: int) -> list[Any]:
    """Hooks that move each quantized layer's input by a last bit of FP16 at most."""
    generator = torch.Generator().manual_seed(seed)

    def move(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        drawn = 2 * torch.rand(inputs[0].shape, generator=generator) - 1
        return (inputs[0] * (1 + _LAST_BIT * drawn.to(inputs[0])),)

    layers = (m for m in model.modules() if isinstance(m, FakeQuantizedLinear))
    return [layer.register_forward_pre_hook(move) for layer in layers]


Quantized = tuple[LoadedModel, str, Callable[[], None]]


def rounded_model(options: argparse.Namespace) -> Quantized:
    """The model with each layer rounded to the format.

    Returns it, the format's name and, for when its layers are kernels, a function that replaces its
    forward pass by decode's, if decode supports the model.
    """
    loaded = load_model(options.model, device=torch.device(options.device))
    model, number = loaded.model, NumberFormat.parse(options.format)
    for site in map_model(model).sites:
        round_to(model, site, number, number)

    def as_decode() -> None:
        architecture = decoded_architecture(model)
        if architecture is not None:
            compute_as_decode(model, ModelWeights(architecture, model), FULL_KV_BITS)

    return loaded, number.name, as_decode


def checkpoint_model(options: argparse.Namespace) -> Quantized:
    """The model of a checkpoint through the reference; otherwise as `rounded_model`."""
    checkpoint = open_checkpoint(Path(options.checkpoint))
    loaded = load_checkpoint(checkpoint, device=torch.device(options.device), through=REFERENCE)

    def as_decode() -> None:
        if decoded_architecture(loaded.model) is not None:
            compute_as_decode(loaded.model, CheckpointWeights(checkpoint), checkpoint.kv_bits)

    return loaded, checkpoint.scheme.name, as_decode


def main() -> int:
    """Compute, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quantized = parser.add_mutually_exclusive_group(required=True)
    quantized.add_argument("--model")
    quantized.add_argument("--checkpoint")
    parser.add_argument("--data", required=True)
    parser.add_argument("--format", default="fp8/row", help="of --model")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default=best_device())
    options = parser.parse_args()
    load = rounded_model if options.checkpoint is None else checkpoint_model
    loaded, name, as_decode = load(options)
    model = loaded.model
    context, bos = loaded.context(options.context), chosen_bos(None, loaded.tokenizer)
    tokens = text_tokens(read_text(options.data), loaded.tokenizer, bos, context)

    def losses(model: Any) -> Losses:
        found = perplexity(
            model, tokens.ids, context=context, max_tokens=options.max_tokens, bos=tokens.bos
        )
        return 100 * np.array(found.nll)

    reference = losses(model)
    drawn: list[float] = []
    for seed in range(options.draws):
        hooks = jittered(model, seed)
        drawn.append(float((losses(model) - reference).mean()))
        for hook in hooks:
            hook.remove()
    through_kernels(model)
    layers = losses(model) - reference
    as_decode()
    whole = losses(model) - reference
    mean, deviation = float(np.mean(drawn)), float(np.std(drawn, ddof=1))
    found = {
        "quantized": name,
        "segments": reference.size,
        "draws_of_last_bits": drawn,
        "mean_of_draws": mean,
        "deviation_of_draws": deviation,
        "kernels_in_linear_layers": float(layers.mean()),
        "kernels_as_decode": float(whole.mean()),
        "standard_error_of_segments": float(whole.std(ddof=1) / reference.size**0.5),
    }
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return int(max(abs(float(x.mean()) - mean) for x in (layers, whole)) > 3 * deviation)


if __name__ == "__main__":
    sys.exit(main())
