"""Time of one decode step and of its parts, by scheme, batch and length.

    python benchmarks/decode/steps.py --model llama-13b --schemes fp16,flexq-w6ax --batch 1,4,8

Weights are synthetic. Measured in one process with one placement: for analysis, not for
comparisons. read_ms is the time to read as many contiguous bytes as weights and cache have.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from itertools import product

import torch
from contents import begin_sequences
from json_lines import say_row
from traffic import read_rate, step_bytes, step_times

from flexq_bench.decode import profile
from flexq_bench.decode.case import open_model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load, release
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.measure import Tuning

_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--schemes", default="fp16,smoothquant-w8a8,flexq-w6ax")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--length", default="1024,256")
    parser.add_argument("--kv-bits", default="16")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    batches = tuple(int(b) for b in arguments.batch.split(","))
    lengths = [int(length) for length in arguments.length.split(",")]
    widths = [int(bits) for bits in arguments.kv_bits.split(",")]
    rate = read_rate()
    for scheme in arguments.schemes.split(","):
        _measure_scheme(scheme, batches, lengths, widths, rate, arguments.model, arguments.profile)


def _measure_scheme(
    scheme: str,
    batches: tuple[int, ...],
    lengths: list[int],
    widths: list[int],
    read_rate: float,
    name: str,
    is_profiled: bool,
) -> None:
    device = torch.device("cuda")
    operations = CudaOperations()
    tuner = StepTuner(device, operations, Tuning.REMEMBERED, frozenset(batches))
    began = time.perf_counter()
    capacity = max(lengths) + 32
    source = open_model(name, scheme, 0)
    model = load(source, device, capacity, tuner, batches)
    loaded = time.perf_counter() - began
    tuner.tune(model)
    for batch, kv_bits in product(batches, widths):
        engine = Engine(
            model,
            operations,
            tuner,
            slots=batch,
            capacity=capacity,
            kv_bits=kv_bits,
        )
        begin_sequences(engine, batch)
        for length in lengths:
            bucket = engine.bucket(length)
            engine.prepare(batch, bucket)
            engine.positions.fill_(length - 64)
            step_ms = statistics.median(step_times(engine, batch, bucket, _STEPS))
            read = step_bytes(source, batch, length, kv_bits)
            read_ms = read / read_rate * 1000
            row = {
                "scheme": scheme,
                "batch": batch,
                "kv_bits": kv_bits,
                "length": length,
                "step_ms": round(step_ms, 4),
                "read_gb": round(read / 1e9, 2),
                "read_ms": round(read_ms, 4),
                "over_read": round(step_ms / read_ms, 3),
                "weights_gb": round(model.nbytes / 1e9, 2),
                "allocated_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
                "load_s": round(loaded, 1),
            }
            if is_profiled:
                engine.positions.fill_(length - 64)
                runs = profile.record(partial(engine.advance, batch, bucket), 4)
                parts = profile.shares(runs[-1], source.architecture.block, len(model.blocks))
                row["parts"] = {s.part: [s.count, round(s.us, 1)] for s in parts}
            say_row(row)
        engine.close()
        del engine
    del model
    release(device)


if __name__ == "__main__":
    main()
