"""A rank of a case of several GPUs: a process on one of them.

python -m flexq_bench.measure.rank_worker --device cuda:0 --rank 0 --ranks 2 --meeting FILE

All ranks get the same requests (flexq_bench.measure.rank_processes). A launch uses a vector, that
is its rows of all inputs, once a sample: kernels may overwrite it, so it is restored before. Those
of the last launch of a sample may be given by a judge.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import OperationKernel, PackedOperand, RankKernel
from flexq_bench.kernels.operand_tensors import Value
from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call
from flexq_bench.kernels.runtime.ranks import ProcessRanks, Ranks
from flexq_bench.measure.device import describe_device, find_device
from flexq_bench.measure.external_loader import add_kernels, add_option
from flexq_bench.measure.given_inputs import Plain, parts_of
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.judged_work import with_elements
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA
from flexq_bench.measure.rank_options import add_rank_options, joined
from flexq_bench.measure.shared_tensors import read_tensors, write_tensors
from flexq_bench.measure.worker_server import end_process, own_pipes, serve
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload

MODULE = "flexq_bench.measure.rank_worker"
COMMAND = (sys.executable, "-m", MODULE)
_MOST_LAUNCHES, _MOST_BYTES = 128, 256 << 20  # of a sample, and of its vectors
_LINK_BYTES, _LINK_REPEATS = 64 << 20, 8  # of an exchange whose rate is that of the links
_CPU_LINK_BYTES = 4 << 20
_HOT_SHARE = 4  # of the L2: vectors of a hot sample are at most 1 / so much

Tensors = Mapping[str, torch.Tensor]


class RankedFunction(RankKernel):
    """A declared function, called with its rank's rows of the inputs and outputs."""

    def __init__(self, kernel: OperationKernel, of: OperationCase) -> None:
        self.spec, self._kernel, self._of = kernel.spec, kernel, of
        self._outputs = of.outputs(torch.device("meta"))  # of all ranks

    def launch(self, ranks: Ranks, given: Tensors) -> Tensors:
        rows = PackedOperand({f"{name}.values": row for name, row in given.items()}, 0, 0)
        device = next(iter(given.values())).device
        out = {name: torch.empty_like(y[0], device=device) for name, y in self._outputs.items()}
        made = self._kernel.launch(self._of.workload, rows, rows, out)
        return {name.removesuffix(".values"): y for name, y in (made or out).items()}


class RankOperations:
    """Operations of a rank. Values in and out are plain JSON."""

    OPERATIONS = (
        *("describe", "prepare", "check", "place", "sample", "inspect", "release"),
        *("fill", "output"),
    )

    def __init__(self, device: torch.device, ranks: ProcessRanks) -> None:
        self._device, self._ranks = device, ranks
        self._on_gpu = device.type == "cuda"
        self._protocol = PROTOCOL_CUDA if self._on_gpu else PROTOCOL_CPU
        nvml = open_handle(device) if self._on_gpu else None
        self._info = describe_device(device, nvml)
        self._link_rate = 0.0  # bytes a second in each direction; 0: not measured yet
        self._sources: dict[str, torch.Tensor] = {}  # [launches, …]
        self._vectors: dict[str, torch.Tensor] = {}  # the same, overwritten by launches
        self._made: list[Tensors] = []  # outputs by launch
        self._given: dict[str, torch.Tensor] = {}  # this rank's rows of a judge's inputs
        self._flushed: torch.Tensor | None = None  # that evicts others from the L2
        self._graph: torch.cuda.CUDAGraph | None = None

    def describe(self) -> dict[str, Any]:
        """Describe the device."""
        return {"uuid": self._info.uuid}

    def prepare(self, case: str, seed: int, secret: int) -> dict[str, Any]:
        """Prepare a case; returns launches of a sample, and the microseconds of its floor."""
        self._case = Case.from_key(case)
        kernel = registry.resolve(self._case.label, "cuda" if self._on_gpu else "cpu")
        assert isinstance(self._case.workload, OperationWorkload)
        self._of = OperationCase(self._case.workload, kernel.spec)
        if isinstance(kernel, OperationKernel):
            kernel = RankedFunction(kernel, self._of)
        assert isinstance(kernel, RankKernel)  # no others are of operations
        self._kernel, self._seed, self._secret = kernel, seed, secret
        self._launches, self._given = self._launch_count(), {}
        rate, floor_bytes = self._rate(), self._of.floor_bytes
        floor_us = None if floor_bytes is None else 1e6 * floor_bytes / rate
        return {"launches": self._launches, "floor_us": floor_us, "link_gb_s": rate / 1e9}

    def check(self, when: str) -> dict[str, Any]:
        """Compare one launch's outputs of all ranks with the reference."""
        inputs = self._drawn(derive_seed(self._seed, "check", when))
        made = self._kernel.launch(self._ranks, self._rows(inputs))
        outputs = {f"{name}.values": self._of_all(out) for name, out in made.items()}
        result = judge_outputs(self._of, inputs, outputs, self._protocol.tolerance)
        return {
            "max_rel_error": result.max_rel_error,
            "exact": result.exact,
            "detail": result.detail,
        }

    def place(self, index: int) -> dict[str, Any]:
        """Allocate and draw the vectors of a sample."""
        self.release()
        self._index = index
        rows = [self._rows(self._content(launch)) for launch in range(self._launches)]
        self._sources = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self._vectors = {name: source.clone() for name, source in self._sources.items()}
        self._take_given()
        if self._case.cache == "cold":
            size = 2 * (self._info.l2_bytes or self._protocol.assumed_l2_bytes)
            self._flushed = torch.zeros(size, dtype=torch.uint8, device=self._device)
        if self._on_gpu:
            self._graph = captured_after_a_call(self._launch_all)
        return {}

    def sample(self, count: int) -> dict[str, Any]:
        """Take samples, which all ranks begin together; returns the microseconds of a launch."""
        graph = self._graph
        if graph is None:
            return {"times_us": [self._timed_on_cpu() for _ in range(count)]}
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            for _ in range(count)
        ]
        for start, stop in events:
            self._restore()
            self._ranks.add(self._flag)
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize(self._device)
        return {
            "times_us": [start.elapsed_time(stop) * 1000 / self._launches for start, stop in events]
        }

    def inspect(self) -> dict[str, Any]:
        """Describe errors in outputs of a sample like the timed ones; empty: none."""
        self._restore()
        if self._graph is not None:
            self._graph.replay()
            torch.cuda.synchronize(self._device)
        else:
            self._launch_all()
        problems = []
        drawn_here = self._launches - bool(self._given)
        for launch in {0, drawn_here - 1} & set(range(drawn_here)):
            outputs = {f"{n}.values": self._of_all(o) for n, o in self._made[launch].items()}
            inputs = self._content(launch)
            judged = judge_outputs(self._of, inputs, outputs, self._protocol.tolerance)
            problems.append(judged.detail)
        return {"detail": next(filter(None, problems), "")}

    def release(self) -> dict[str, Any]:
        """Free the vectors."""
        self._sources, self._vectors, self._made = {}, {}, []
        self._flushed = self._graph = None
        if self._on_gpu:
            torch.cuda.empty_cache()
        return {}

    def fill(self, path: str, layout: list[list[Any]], plain: Plain) -> dict[str, Any]:
        """Use a judge's inputs, from shared memory, in the last launch of each sample."""
        parts = parts_of(read_tensors(Path(path), layout, torch.device("cpu")), plain)
        for name, part in parts.items():
            assert isinstance(part, torch.Tensor)  # inputs of several GPUs are no operands
            self._given[name] = part[self._ranks.rank].to(self._device)
        self._take_given()
        return {}

    def output(self, path: str) -> dict[str, Any]:
        """Write the outputs of all ranks of the latest last launch; rank 0 does."""
        made = {f"{name}.values": self._of_all(out) for name, out in self._made[-1].items()}
        if self._ranks.rank == 0:
            write_tensors(Path(path), with_elements(made))
        return {}

    def _take_given(self) -> None:
        for name, row in self._given.items():
            if name in self._sources:
                self._sources[name][-1].copy_(row)

    @property
    def _flag(self) -> torch.Tensor:
        return torch.zeros(1, device=self._device)

    def _launch_count(self) -> int:
        size = max(1, self._of.bytes_of(self._of.definition.inputs) // self._ranks.count)
        most = _MOST_BYTES
        if self._case.cache == "hot":
            most = (self._info.l2_bytes or self._protocol.assumed_l2_bytes) // _HOT_SHARE
        return max(1, min(_MOST_LAUNCHES if self._on_gpu else 4, most // size))

    def _rate(self) -> float:
        """Bytes a second from each rank to the next, while all send."""
        if not self._link_rate:
            size = _LINK_BYTES if self._on_gpu else _CPU_LINK_BYTES
            sent = torch.ones(size, dtype=torch.uint8, device=self._device)
            times = [self._exchange_s(sent) for _ in range(_LINK_REPEATS)]
            self._link_rate = size / min(times[1:])
        return self._link_rate

    def _exchange_s(self, sent: torch.Tensor) -> float:
        self._ranks.any(False)  # waits for all
        began = time.perf_counter()
        if not self._on_gpu:
            self._ranks.exchange(sent)
            return time.perf_counter() - began
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._ranks.exchange(sent)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000

    def _drawn(self, seed: int) -> dict[str, Value]:
        generator = torch.Generator(self._device).manual_seed(seed)
        return self._of.draw(self._of.definition.inputs, generator)

    def _content(self, launch: int) -> dict[str, Value]:
        return self._drawn(derive_seed(self._secret, "placement", self._index, launch))

    def _rows(self, inputs: Mapping[str, Value]) -> dict[str, torch.Tensor]:
        """This rank's rows."""
        rank = self._ranks.rank
        return {
            name: value.plain[rank].clone()
            for name, value in inputs.items()
            if value.plain is not None
        }

    def _of_all(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        flat = row.reshape(1, -1)
        if row.itemsize == 1:  # not all libraries add FP8 numbers
            flat = flat.view(torch.uint8)
        return self._ranks.joined(flat).view(row.dtype).view(self._ranks.count, *row.shape)

    def _launch_all(self) -> None:
        self._made = [
            self._kernel.launch(self._ranks, {name: v[i] for name, v in self._vectors.items()})
            for i in range(self._launches)
        ]

    def _restore(self) -> None:
        for name, source in self._sources.items():
            self._vectors[name].copy_(source)
        if self._flushed is not None:
            self._flushed.add_(1)

    def _timed_on_cpu(self) -> float:
        self._restore()
        self._ranks.any(False)
        began = time.perf_counter()
        self._launch_all()
        return (time.perf_counter() - began) * 1e6 / self._launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    add_rank_options(parser)
    add_option(parser)
    options = parser.parse_args()
    requests, replies = own_pipes()
    add_kernels(options.kernels_from)
    device = find_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = joined(options, device)
    assert isinstance(ranks, ProcessRanks)  # a case of one GPU has no ranks
    operations = RankOperations(device, ranks)
    with torch.inference_mode():
        serve(operations, requests, replies, operations.OPERATIONS)


if __name__ == "__main__":
    main()
    end_process()
