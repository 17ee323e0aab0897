"""Time of one decode step by scheme, batch and length, with what each part of it adds.

    python benchmarks/decode/steps.py --model llama-13b --schemes fp16,flexq-w6ax --batch 1,4,8

Weights are synthetic. One process, one placement: to see where time goes, not to compare by.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

from flexq_bench.decode import profile
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load, release
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.measure import Tuning
from kernels.decoder.cuda_operations import CudaOperations
from workloads.models import get_model
from workloads.schemes import get_scheme

_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--schemes", default="fp16,smoothquant-w8a8,flexq-w6ax")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--length", default="1024,256")
    parser.add_argument("--kv-bits", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    batches = tuple(int(b) for b in arguments.batch.split(","))
    lengths = [int(length) for length in arguments.length.split(",")]
    for scheme in arguments.schemes.split(","):
        _one_scheme(scheme, batches, lengths, arguments)


def _one_scheme(
    scheme: str, batches: tuple[int, ...], lengths: list[int], arguments: argparse.Namespace
) -> None:
    device = torch.device("cuda")
    operations = CudaOperations()
    tuner = StepTuner(device, operations, Tuning.REMEMBERED, frozenset(batches))
    architecture = of_catalog(get_model(arguments.model))
    began = time.perf_counter()
    capacity = max(lengths) + 32
    source = SyntheticWeights(architecture, 0)
    model = load(source, get_scheme(scheme), device, capacity, tuner, batches)
    loaded = time.perf_counter() - began
    for batch in batches:
        engine = Engine(
            model,
            operations,
            tuner,
            slots=batch,
            capacity=capacity,
            kv_bits=arguments.kv_bits,
        )
        engine.generate(torch.ones(batch, 15, dtype=torch.int32, device=device), 2)
        for length in lengths:
            bucket = engine.bucket(length)
            engine.prepare(batch, bucket)
            engine.positions.fill_(length - 64)
            times = []
            for _ in range(_STEPS):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                engine.advance(batch, bucket)
                stop.record()
                times.append((start, stop))
            torch.cuda.synchronize()
            step_ms = statistics.median(a.elapsed_time(b) for a, b in times)
            row = {
                "scheme": scheme,
                "batch": batch,
                "length": length,
                "step_ms": round(step_ms, 4),
                "weights_gb": round(model.nbytes / 1e9, 2),
                "allocated_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
                "load_s": round(loaded, 1),
            }
            if arguments.profile:
                engine.positions.fill_(length - 64)
                runs = profile.record(lambda e=engine, b=batch, k=bucket: e.advance(b, k), 4)
                layers = architecture.dimensions.layers
                found = profile.shares(runs[-1], architecture.block, layers)
                row["parts"] = {s.part: [s.count, round(s.us, 1)] for s in found}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        engine.close()
        del engine
    del model
    release(device)


if __name__ == "__main__":
    main()
