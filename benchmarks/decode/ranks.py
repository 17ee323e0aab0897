"""Steps on several GPUs against one: logits, time, and time of the bytes and sums.

    python benchmarks/decode/ranks.py --model llama-2-70b --alone flexq-w6ax,dual-w6a8
        --together fp16,smoothquant-w8a8 --batch 1,8,32 --parity tinyllama-1.1b

alone: schemes on one GPU each, at the same time. together: on all. parity: a model whose logits on
all GPUs are compared with those on one, under all schemes. Weights are random. `read_ms`: the
bytes of a GPU's step at the rate at which 4 GB were read; `exchange_us`: of a sum in a CUDA graph.
An empty model, or no GPU (for tiny models): only logits are compared. library: also with all sums
by NCCL, in place of short ones by csrc/ranks/exchange.cu.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from contents import fill_randomly
from json_lines import say_row
from traffic import read_rate, step_bytes, step_times, timing_event

from flexq_bench.decode.case import open_model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import compile_layers, load, release
from flexq_bench.decode.tensor_parallel import RankWeights
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.decode.weights import WeightSource
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call
from flexq_bench.kernels.runtime.ranks import ALONE, ProcessRanks, Ranks
from flexq_bench.measure.rank_options import add_rank_options
from flexq_bench.workloads.gemm import GemmWorkload

_CAPACITY, _BEGIN, _STEPS, _WARM_UP = 128, 48, 40, 8
_PARITY_BATCH, _PARITY_STEPS = 4, 24
_EXCHANGES = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--alone", default="")
    parser.add_argument("--together", default="fp16")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--parity", default="")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--library", action="store_true")
    add_rank_options(parser)
    options = parser.parse_args()
    if options.meeting is not None:
        _measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        ends = ("--ranks", str(options.gpus), "--meeting", str(Path(folder) / "meeting"))
        command = [sys.executable, *sys.argv, *ends]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.gpus)
        ]
        sys.exit(max(process.wait() for process in started))


def _measure(options: argparse.Namespace) -> None:
    rank, count = options.rank, options.ranks
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = ProcessRanks(device, rank, count, options.meeting)
    every: list[Ranks] = [ranks, *([LibraryRanks(ranks)] if options.library else ())]
    alone, together = ([s for s in t.split(",") if s] for t in (options.alone, options.together))
    batches = tuple(int(batch) for batch in options.batch.split(","))
    if on_gpu and options.model:
        rate = read_rate()
        release(device)
        for scheme in alone[rank::count]:
            _time(options.model, scheme, batches, device, ALONE, rate)
        for scheme in together:
            for several in every:
                _time(options.model, scheme, batches, device, several, rate)
    for scheme in dict.fromkeys((*together, *alone) if options.parity else ()):
        for several in every:
            _compare(options.parity, scheme, device, several)


class LibraryRanks(Ranks):
    """Ranks whose sums are all by the library."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self.rank, self.count, self._others = ranks.rank, ranks.count, ranks

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self._others.joined(x)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return self._others.largest(x)

    def any(self, condition: bool) -> bool:
        return self._others.any(condition)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return self._others.add_by_library(x)


def _choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
    return kernel.default_config(GemmWorkload(m, n, k))


def _share(model: str, scheme: str, ranks: Ranks) -> WeightSource:
    source = open_model(model, scheme, 0)
    return source if ranks is ALONE else RankWeights(source, ranks)


def _time(
    name: str,
    scheme: str,
    batches: tuple[int, ...],
    device: torch.device,
    ranks: Ranks,
    rate: float,
) -> None:
    source = _share(name, scheme, ranks)
    compile_layers(source, device, _choose, batches)
    model = load(source, device, _CAPACITY, _choose, batches, ranks=ranks)
    operations = operations_on(device)
    for batch in batches:
        engine = Engine(model, operations, _choose, slots=batch, capacity=_CAPACITY)
        engine.prepare(batch, _CAPACITY)
        fill_randomly(engine.caches, model.attention.head_dim)
        engine.positions.fill_(_BEGIN)
        times = step_times(engine, batch, _CAPACITY, _WARM_UP + _STEPS)
        step_ms = statistics.median(times[_WARM_UP:])
        read_ms = step_bytes(source, batch, _BEGIN + _STEPS // 2, 16) / rate * 1000
        sums = 2 * len(model.blocks) if ranks.count > 1 else 0
        sum_us = _exchange_us(ranks, device, batch, source.architecture.dimensions.hidden)
        row = {
            "sums": type(ranks).__name__,
            "model": name,
            "scheme": scheme,
            "gpus": ranks.count,
            "batch": batch,
            "step_ms": round(step_ms, 4),
            "tokens_s_gpu": round(1000 * batch / step_ms / ranks.count, 2),
            "read_ms": round(read_ms, 4),
            "exchange_us": round(sum_us, 2),
            "over_bytes_and_sums": round(step_ms / (read_ms + sums * sum_us / 1000), 3),
            "weights_gb": round(model.nbytes / 1e9, 2),
        }
        if ranks.rank == 0:
            say_row(row)
        engine.close()
        del engine
    del model
    release(device)


def _exchange_us(ranks: Ranks, device: torch.device, batch: int, hidden: int) -> float:
    if ranks.count == 1:
        return 0.0
    x = torch.zeros(batch, hidden, dtype=torch.float16, device=device)

    def exchange() -> None:
        for _ in range(_EXCHANGES):
            ranks.add(x)

    graph = captured_after_a_call(exchange)
    times: list[float] = []
    for _ in range(10):
        start, stop = timing_event(), timing_event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / _EXCHANGES)
    return statistics.median(times)


def _compare(name: str, scheme: str, device: torch.device, ranks: Ranks) -> None:
    one, several = (_logits(name, scheme, device, by) for by in (ALONE, ranks))
    difference = (several - one).abs()
    row = {
        "parity": name,
        "sums": type(ranks).__name__,
        "scheme": scheme,
        "gpus": ranks.count,
        "max_difference": round(float(difference.max()), 5),
        "mean_difference": round(float(difference.mean()), 6),
        "logits_std": round(float(one.std()), 4),
        "same_next_token": round(float((several.argmax(2) == one.argmax(2)).float().mean()), 4),
    }
    if ranks.rank == 0:
        say_row(row)


def _logits(name: str, scheme: str, device: torch.device, ranks: Ranks) -> torch.Tensor:
    """Logits FP32 [steps, B, vocab] of the same random tokens, one after the other."""
    source = _share(name, scheme, ranks)
    batch, steps = _PARITY_BATCH, _PARITY_STEPS
    compile_layers(source, device, _choose, (batch,))
    model = load(source, device, _CAPACITY, _choose, (batch,), ranks=ranks)
    engine = Engine(model, operations_on(device), _choose, slots=batch, capacity=_CAPACITY)
    engine.prepare(batch, _CAPACITY)
    generator = torch.Generator().manual_seed(0)
    vocab = source.architecture.dimensions.vocab
    tokens = torch.randint(3, vocab, (steps, batch), generator=generator, dtype=torch.int32)
    logits = []
    for position in range(steps):
        engine.positions.fill_(position)
        engine.tokens.copy_(tokens[position])
        logits.append(engine.advance(batch, _CAPACITY).float())
    engine.close()
    release(device)
    return torch.stack(logits)


if __name__ == "__main__":
    main()
