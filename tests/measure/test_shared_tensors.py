"""Tensors in shared memory: what one side writes, the other reads, whatever else it does."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.measure.shared_tensors import (
    Exchange,
    exchange_folder,
    layout_of,
    read_tensors,
    write_tensors,
)

CPU = torch.device("cpu")


@pytest.fixture
def exchange():
    with exchange_folder() as folder, Exchange(folder) as made:
        yield made


def some_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(5, 7, generator=generator)
    return {
        "half": real.half().T,  # not contiguous
        "fp8": real.to(torch.float8_e4m3fn),
        "codes": torch.arange(-3, 4, dtype=torch.int8)[None],
        "none": torch.empty(0, 3),
        "mask": real > 0,
        "number": torch.tensor(2.5, dtype=torch.float64),
    }


def same(first, second):
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape)
        assert torch.equal(tensor.float(), second[name].float())


def test_worker_reads_what_the_judge_gives_each_time(exchange):
    for seed in range(2):
        layout = exchange.give(some_tensors(seed))
        same(read_tensors(exchange.inputs, layout, CPU), some_tensors(seed))


def test_judge_takes_what_the_worker_writes_once(exchange):
    for seed in range(2):
        write_tensors(exchange.outputs, some_tensors(seed))
        same(exchange.take(layout_of(some_tensors(seed))), some_tensors(seed))

    with pytest.raises(ValueError, match="0 bytes in place of"):
        exchange.take(layout_of(some_tensors(0)))


def test_outputs_of_another_size_are_refused(exchange):
    write_tensors(exchange.outputs, {"out": torch.zeros(4, 9)})

    with pytest.raises(ValueError, match="144 bytes in place of 128"):
        exchange.take([("out", "float32", (4, 8))])


def test_judge_reads_its_own_file_whatever_lies_in_its_place(exchange):
    write_tensors(exchange.outputs, {"out": torch.ones(4)})
    exchange.outputs.unlink()
    exchange.outputs.symlink_to("/dev/zero")

    assert exchange.take([("out", "float32", (4,))])["out"].tolist() == [1.0] * 4


@pytest.mark.parametrize("layout", [[["x", "float33", [1]]], [["x", "float32", [-1]]]])
def test_layouts_without_a_meaning_are_refused(exchange, layout):
    with pytest.raises(ValueError, match="no tensor of"):
        read_tensors(exchange.inputs, layout, CPU)


def test_too_short_a_file_of_inputs_is_refused(exchange):
    layout = exchange.give({"x": torch.zeros(3)})
    layout[0][2][0] = 4

    with pytest.raises(ValueError, match="x is shorter than 16 bytes"):
        read_tensors(exchange.inputs, layout, CPU)
