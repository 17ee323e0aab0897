"""Milliseconds per token of our FP16 path and of transformers' generate, on one model and GPU.

    python benchmarks/decode/against_transformers.py --model llama-13b

transformers uses a static cache and a compiled decode step (torch.compile, mode reduce-overhead,
which uses CUDA graphs). Both have random weights of the model's shapes; --layers reduces the number
of blocks. The time per token is that of the whole generation over its tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from json_lines import say_row

from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.measure import Tuning
from flexq_bench.workloads.model_spec import ModelSpec
from flexq_bench.workloads.models import get_model

_PROMPT, _NEW = 15, 128
_REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    model = get_model(arguments.model)
    if arguments.layers is not None:
        model = dataclasses.replace(model, layers=arguments.layers)
    for name, prepare in (("ours", _ours), ("transformers", _theirs)):
        generate = prepare(model, arguments.batch)
        times = [_seconds(generate) for _ in range(1 + _REPEATS)][1:]
        token_ms = 1000 * statistics.median(times) / _NEW
        row = {"who": name, "model": model.name, "layers": model.layers, "batch": arguments.batch}
        say_row({**row, "token_ms": round(token_ms, 4)})


def _ours(model: ModelSpec, batch: int) -> Callable[[], object]:
    device, operations = torch.device("cuda"), CudaOperations()
    tuner = StepTuner(device, operations, Tuning.REMEMBERED, frozenset((batch,)))
    source = SyntheticWeights(of_catalog(model), 0)
    capacity = _PROMPT + _NEW
    loaded = load(source, device, capacity, tuner, (batch,))
    tuner.tune(loaded)
    engine = Engine(loaded, operations, tuner, slots=batch, capacity=capacity)
    prompts = torch.ones(batch, _PROMPT, dtype=torch.int32, device=device)
    return lambda: engine.generate(prompts, _NEW)


def _theirs(model: ModelSpec, batch: int) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        max_position_embeddings=model.context,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        reference = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    prompts = torch.ones(batch, _PROMPT, dtype=torch.int64, device="cuda")

    def generate() -> object:
        with torch.inference_mode():
            return reference.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=_NEW,
                max_new_tokens=_NEW,
                do_sample=False,
                cache_implementation="static",
            )

    return generate


def _seconds(generate: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    generate()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
