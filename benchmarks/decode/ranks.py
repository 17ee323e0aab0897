"""Logits and time of a step on several GPUs against one, in one process per GPU.

    python benchmarks/decode/ranks.py --model llama-7b --schemes fp16,flexq-w6ax --gpus 2

Weights of a catalog name are random. Both decode the tokens of one GPU. exchange_us: of one sum of
a layer's output, in a CUDA graph. Without a GPU the same on CPU kernels, for tiny models.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from json_lines import say_row
from torch import multiprocessing

from flexq_bench.decode.case import open_model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import load, release
from flexq_bench.decode.tensor_parallel import RankWeights
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call
from flexq_bench.kernels.runtime.ranks import ALONE, ProcessRanks, Ranks

_PROMPT, _NEW, _EXCHANGES = 32, 48, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--schemes", default="fp16,flexq-w6ax,dual-w6a8,smoothquant-w8a8")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, Path(folder) / "meeting")
        multiprocessing.spawn(_compare, args=arguments, nprocs=options.gpus)  # type: ignore


def _compare(rank: int, options: argparse.Namespace, meeting: Path) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = ProcessRanks(device, rank, options.gpus, meeting)
    generator = torch.Generator().manual_seed(0)
    for scheme in options.schemes.split(","):
        vocab = open_model(options.model, scheme, 0).architecture.dimensions.vocab
        ids = torch.randint(3, vocab, (options.batch, _PROMPT), generator=generator).int()
        one, tokens, one_ms = _decoded(options.model, scheme, ids.to(device), ALONE)
        release(device)
        several, _, ms = _decoded(options.model, scheme, ids.to(device), ranks, tokens)
        release(device)
        difference = (several - one).abs()
        row = {
            "model": options.model,
            "scheme": scheme,
            "batch": options.batch,
            "gpus": options.gpus,
            "max_difference": round(float(difference.max()), 5),
            "mean_difference": round(float(difference.mean()), 6),
            "logits_std": round(float(one.std()), 4),
            "same_next_token": round(float((several.argmax(2) == one.argmax(2)).float().mean()), 4),
            "one_ms": round(one_ms, 4),
            "several_ms": round(ms, 4),
            "speed_up": round(one_ms / ms, 3),
        }
        if on_gpu:
            hidden = open_model(options.model, scheme, 0).architecture.dimensions.hidden
            row["exchange_us"] = round(_exchange_us(ranks, device, options.batch, hidden), 2)
        if rank == 0:
            say_row(row)


def _decoded(
    model: str, scheme: str, ids: torch.Tensor, ranks: Ranks, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Logits FP32 [steps, B, vocab], tokens [B, new], and the milliseconds of a step.

    tokens: to decode instead of the likeliest ones.
    """
    source = open_model(model, scheme, 0)
    share = source if ranks is ALONE else RankWeights(source, ranks)

    def choose(*_: object) -> None:
        return None

    capacity = _PROMPT + _NEW
    loaded = load(share, ids.device, capacity, choose, (len(ids),), ranks=ranks)
    engine = Engine(loaded, operations_on(ids.device), choose, slots=len(ids), capacity=capacity)
    logits: list[torch.Tensor] = []

    def keep(position: int, row: torch.Tensor) -> None:
        logits.append(row.float())
        if tokens is not None and position < capacity:
            engine.tokens[: len(ids)] = tokens[:, position - _PROMPT].int()

    generated = engine.generate(ids, _NEW, keep)
    timed = engine.generate(ids, _NEW)
    engine.close()
    return torch.stack(logits), generated.tokens, statistics.median(timed.step_ms)


def _exchange_us(ranks: Ranks, device: torch.device, batch: int, hidden: int) -> float:
    x = torch.zeros(batch, hidden, dtype=torch.float16, device=device)

    def exchange() -> None:
        for _ in range(_EXCHANGES):
            ranks.add(x)

    graph = captured_after_a_call(exchange)
    times: list[float] = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / _EXCHANGES)
    return statistics.median(times)


if __name__ == "__main__":
    main()
