"""Time of a decode step of a model with experts, by scheme and batch, and the bytes it reads.

    python benchmarks/decode/mixtures.py --schemes fp16,dual-w6a8 --batch 1,8,32

Weights are synthetic. Of the blocks only --distinct are drawn and used in turn: an unquantized
model needs not fit, and between two uses of a block more is read than the L2 cache holds (printed
as between_mb). touched: experts with tokens in a block, their mean in one step; of read_mb and
over_read only these count. Configurations are the default ones. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from contents import begin_sequences
from json_lines import say_row
from traffic import read_rate, step_times

from flexq_bench.decode import profile
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.decoder import Model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.experts import PackedExperts
from flexq_bench.decode.loading import compile_layers, load, release
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.kernels.cuda.grouped.layer import ExpertLayer
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import token_bytes
from flexq_bench.measure import Tuning
from flexq_bench.schemes.registry import resolve
from flexq_bench.workloads.models import get_model

_STEPS, _LENGTH = 60, 512  # timed steps; tokens of a sequence
_DEVICE = torch.device("cuda")


def loaded(
    name: str, scheme: str, distinct: int, tuner: StepTuner, batches: tuple[int, ...]
) -> Model:
    """A model of the catalog whose blocks are `distinct` ones in turn."""
    whole = of_catalog(get_model(name))
    few = replace(whole, dimensions=replace(whole.dimensions, layers=distinct))
    source = RoundedWeights(SyntheticWeights(few, 0), resolve(scheme))
    compile_layers(source, _DEVICE, tuner, batches)
    model = load(source, _DEVICE, _LENGTH + 64, tuner, batches)
    blocks = tuple(model.blocks[i % distinct] for i in range(whole.dimensions.layers))
    return replace(model, architecture=whole, blocks=blocks)


def touched_experts(engine: Engine, batch: int, bucket: int) -> list[int]:
    """Number of experts with tokens, of each block in one step."""
    counts: list[int] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def mix(layer: ExpertLayer, *given: Any, **named: Any) -> Any:
            made = original(layer, *given, **named)
            counts.append(int((layer.sizes > 0).sum()))
            return made

        return mix

    ways: Any = {name: counting(getattr(ExpertLayer, name)) for name in ("mix", "mix_norm")}
    with patch.multiple(ExpertLayer, **ways):
        engine.advance(batch, bucket)
    return counts


def bytes_of(model: Model, batch: int, touched: float) -> tuple[float, float]:
    """Bytes that a step reads, and those of one block."""
    shape, block = model.attention, model.blocks[0]
    assert isinstance(block.down, PackedExperts)
    experts = block.down.nbytes * touched / block.down.count
    cache = 2 * shape.kv_heads * _LENGTH * batch * token_bytes(shape.head_dim, 16)
    of_block = experts + sum(linear.nbytes for linear in block.linears) + cache
    return len(model.blocks) * of_block + model.head.nbytes, of_block


def step_ms(engine: Engine, batch: int, bucket: int) -> float:
    """Median time of a captured step."""
    engine.prepare(batch, bucket)
    engine.positions.fill_(_LENGTH - 64)
    return statistics.median(step_times(engine, batch, bucket, _STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--schemes", default="fp16,smoothquant-w8a8,dual-w6a8,dgq-w4a8")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--distinct", type=int, default=12)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    batches = tuple(map(int, given.batch.split(",")))
    rate = read_rate()
    first: dict[int, float] = {}  # milliseconds of the first scheme
    for scheme in given.schemes.split(","):
        tuner = StepTuner(_DEVICE, CudaOperations(), Tuning.NONE, frozenset(batches))
        model = loaded(given.model, scheme, given.distinct, tuner, batches)
        for batch in batches:
            engine = Engine(model, CudaOperations(), tuner, slots=batch, capacity=_LENGTH + 64)
            begin_sequences(engine, batch)
            bucket = engine.bucket(_LENGTH)
            touched = statistics.mean(touched_experts(engine, batch, bucket))
            ms = step_ms(engine, batch, bucket)
            first.setdefault(batch, ms)
            read, of_block = bytes_of(model, batch, touched)
            row = {
                "scheme": scheme,
                "batch": batch,
                "step_ms": round(ms, 4),
                "tokens_s": round(batch / ms * 1000),
                "faster": round(first[batch] / ms, 3),
                "touched": round(touched, 1),
                "read_mb": round(read / 1e6),
                "over_read": round(ms / (read / rate * 1000), 3),
                "between_mb": round(of_block * (given.distinct - 1) / 1e6),
            }
            if given.profile:
                engine.positions.fill_(_LENGTH - 64)
                runs = profile.record(partial(engine.advance, batch, bucket), 3)
                parts = profile.shares(runs[-1], "llama", len(model.blocks))
                row["parts"] = {s.part: [s.count, round(s.us, 1)] for s in parts}
            say_row(row)
            engine.close()
            del engine
        del model
        release(_DEVICE)


if __name__ == "__main__":
    main()
