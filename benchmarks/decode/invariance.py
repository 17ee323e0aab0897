"""SHA-256 of the logits of the same sequences in batches and chunks of several sizes.

    python benchmarks/decode/invariance.py --model smollm2-135m --batch 1,8,32,128 --prompts 512

Prompts are random, of --shortest to --longest tokens, each read in one chunk, or in chunks of
--chunk tokens; then each sequence decodes --new tokens. The hash is of all logits after prompts and
steps, by sequence. step_ms: a step of the largest batch with and without invariance.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product

import torch
from json_lines import say_row
from traffic import step_times

from flexq_bench.decode.case import open_model
from flexq_bench.decode.decoder import Chunks
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.invariance import invariant_kernel, sha256_of
from flexq_bench.decode.loading import linear_kernel, load
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.kernels.decoder.invariant import invariant_operations
from flexq_bench.workloads.gemm import GemmWorkload

_TIMED_STEPS = 30
_MOST_TOKENS = 1 << 15  # of prompts that are read at once


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--scheme", default="dual-w6a8")
    parser.add_argument("--batch", default="1,8,32,128")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--chunk", default="0,100")
    parser.add_argument("--new", type=int, default=8)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = open_model(options.model, options.scheme, 0)
    capacity = options.longest + options.new
    model = load(source, device, capacity, _choose, (1,), find=invariant_kernel)
    generator = torch.Generator().manual_seed(0)
    vocab = source.architecture.dimensions.vocab
    lengths = torch.randint(
        options.shortest, options.longest + 1, (options.prompts,), generator=generator
    ).tolist()
    ids = [torch.randint(3, vocab, (n,), generator=generator, dtype=torch.int32) for n in lengths]
    for batch in map(int, options.batch.split(",")):
        for chunk in map(int, options.chunk.split(",")):
            engine = Engine(
                model, invariant_operations(device), _choose, slots=batch, capacity=capacity
            )
            logits = []
            for first in range(0, len(ids), batch):
                group = [part.to(device) for part in ids[first : first + batch]]
                logits.append(_decoded(engine, group, chunk or options.longest, options.new))
            engine.close()
            row = {"scheme": options.scheme, "batch": batch, "chunk": chunk, "prompts": len(ids)}
            row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            say_row({**row, "sha256": sha256_of(torch.cat(logits))})
    if device.type == "cuda":
        usual = load(source, device, capacity, _choose, (1,), find=linear_kernel)
        for batch in map(int, options.batch.split(",")):
            times = [
                _step_ms(Engine(of, by, _choose, slots=batch, capacity=capacity), batch)
                for of, by in (
                    (usual, operations_on(device)),
                    (model, invariant_operations(device)),
                )
            ]
            say_row({"batch": batch, "usual_ms": times[0], "invariant_ms": times[1]})


def _choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
    # By bucket: prompts of hundreds of lengths would each need an estimate of every configuration.
    return kernel.default_config(GemmWorkload(kernel.tuning_bucket(m), n, k))


def _decoded(engine: Engine, ids: list[torch.Tensor], chunk: int, new: int) -> torch.Tensor:
    """Logits FP16 [sequences, 1 + steps, vocab], on the CPU."""
    device, count = engine.model.device, len(ids)
    last: list[torch.Tensor | None] = [None] * count
    longest = max(map(len, ids))
    bucket = engine.bucket(longest + new)
    engine.prepare(count, bucket)
    rows = _MOST_TOKENS // min(chunk, longest)  # that are read at once
    for start, top in product(range(0, longest, chunk), range(0, count, rows)):
        slots = [i for i in range(count)[top : top + rows] if len(ids[i]) > start]
        if not slots:
            continue
        parts = [ids[i][start : start + chunk] for i in slots]
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        counts = torch.tensor([len(part) for part in parts], device=device)
        places = torch.tensor(slots, device=device)
        begin = torch.full_like(places, start)
        end = min(start + tokens.shape[1], engine.capacity)
        logits = engine.read(Chunks(tokens, begin, counts, places, end), len(slots))
        for row, slot in enumerate(slots):
            if len(ids[slot]) <= start + chunk:
                last[slot] = logits[row].cpu()
    first = torch.stack([row for row in last if row is not None])
    # Chunks of other sequences moved the positions of those that had ended.
    ends = torch.tensor([len(part) for part in ids], device=device, dtype=torch.int32)
    engine.positions[:count] = ends
    engine.tokens[:count] = first.argmax(dim=1).to(device).int()
    steps = [first]
    steps += [engine.advance(count, bucket).cpu() for _ in range(new)]
    return torch.stack(steps, dim=1)


def _step_ms(engine: Engine, batch: int) -> float:
    bucket = engine.bucket(256)
    engine.prepare(batch, bucket)
    engine.positions.fill_(128)
    times = step_times(engine, batch, bucket, _TIMED_STEPS)
    engine.close()
    return round(statistics.median(times[10:]), 4)


if __name__ == "__main__":
    main()
