"""Rewriting of operands in place between samples."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.formats import (
    NumberFormat,
    quantize,
    quantize_dual_grained,
    quantize_symmetric,
)
from flexq_bench.kernels.reference import reference_of
from flexq_bench.measure.activation_rotation import Rewriting, Slots
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.inputs import realistic_inputs
from flexq_bench.measure.linear_work import LinearWork
from flexq_bench.measure.weight_rotation import Content, WeightCopies


@pytest.fixture
def recorded(a_meter, a_case, fake_linear):
    """Batches of one placement, each a kept and a timed sample: of each launch the addresses and
    contents of X and W."""

    class Recording(fake_linear):
        def __init__(self):
            super().__init__()
            self.seen = []

        def gemm(self, x, w, out, *, bias=None, config=None):
            super().gemm(x, w, out, config=config)
            of = [operand.buffers["real"] for operand in (x, w)]
            self.seen.append([(t.data_ptr(), float(t.sum()), t.clone()) for t in of])

    def run(batches, *, secret=1, launches=6, **fields):
        kernel = Recording()
        # With the usual share of a small L2, activations of a sample would repeat.
        roomy = {"pool_share": 1.0, "assumed_l2_bytes": 1 << 20}
        protocol = replace(a_meter().protocol, target_sample_us=0.0, min_sample_us=0.0, **roomy)
        meter = a_meter(kernel, protocol=protocol, secret=secret)
        with meter.device_guard():
            prepared = meter.prepare(a_case(**fields))
            with prepared.placed(0) as placed:
                placed.rotation.launches = launches
                kernel.seen.clear()
                found = []
                for _ in range(batches):
                    placed.buffers.between.keep_samples(1)
                    placed.rotation.sample(1)
                    assert len(kernel.seen) == 2 * launches
                    found.append((kernel.seen[:launches], kernel.seen[launches:]))
                    kernel.seen.clear()
                assert placed.inspect() == ""
        return found

    return run


@pytest.mark.parametrize("stage", ["gemm", "linear"])
def test_activations_change_in_place_between_samples(recorded, stage):
    samples = [sample for batch in recorded(5, cache="hot", stage=stage) for sample in batch]

    firsts = [sample[0][0] for sample in samples]
    assert len({address for address, _, _ in firsts}) == 1
    assert all(a[1] != b[1] for a, b in pairwise(firsts))


def test_weights_change_in_place_between_batches(recorded):
    batches = recorded(4, cache="hot")

    weights = [launch[1] for batch in batches for sample in batch for launch in sample]
    assert len({address for address, _, _ in weights}) == 1
    contents = [timed[0][1][2] for _, timed in batches]
    assert not any(torch.equal(a, b) for a, b in pairwise(contents))


def test_launches_of_a_sample_have_distinct_operands(recorded):
    for sample in (sample for batch in recorded(3, cache="hot") for sample in batch):
        pairs = {(x[0], w[0]) for x, w in sample}
        assert len(pairs) == len(sample) == 6


def test_launches_of_a_pass_share_activations(recorded):
    (batch,) = recorded(1, cache="cold", launches=8)

    for sample in batch:
        assert len({w[0] for _, w in sample}) == 8
        assert len({x[0] for x, _ in sample}) == 1


def test_changes_depend_on_the_secret(recorded):
    def sums(secret):
        batches = recorded(6, secret=secret, cache="hot")
        return [x[1] for batch in batches for sample in batch for x, _ in sample]

    assert sums(1) == sums(1)
    assert sums(1) != sums(2)


def test_secret_is_recorded_and_differs_between_meters(a_meter, a_case, fake_linear):
    first, second = (a_meter(fake_linear(), secret=None).measure(a_case()) for _ in range(2))

    assert first.extra["secret"] != second.extra["secret"]
    told = a_meter(fake_linear(), secret=first.extra["secret"]).measure(a_case())
    assert told.extra["secret"] == first.extra["secret"]


def weight_contents(count):
    operand = quantize_symmetric(torch.zeros(1, 8), 6, None)
    packed = [PackedOperand({"codes": torch.full((4,), i)}, 1, 4) for i in range(count)]
    return [Content(operand, weights) for weights in packed]


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_copies_have_distinct_contents(copies):
    contents = weight_contents(copies + 1)
    weights = WeightCopies(contents, copies, random.Random(3))

    for copy in random.Random(4).choices(range(copies), k=40):
        before = weights.current[copy]
        weights.rewrite(copy)
        assert weights.current[copy] is not before
        assert len({id(content) for content in weights.current}) == copies
        assert [weights.changed(i) for i in range(copies)] == [None] * copies


def test_copies_that_are_used_again_have_distinct_contents_again():
    weights = WeightCopies(weight_contents(6), 5, random.Random(3))
    places = [copy.buffers["codes"].data_ptr() for copy in weights]
    for copy in range(5):  # as for a check
        weights.set_content(copy, weights.current[0])

    weights.deal_again(weight_contents(6), random.Random(4))

    assert [copy.buffers["codes"].data_ptr() for copy in weights] == places
    assert len({int(copy.buffers["codes"][0]) for copy in weights}) == 5
    assert [weights.changed(i) for i in range(5)] == [None] * 5


def test_few_contents_change_too():
    weights = WeightCopies(weight_contents(2), 5, random.Random(3))

    for copy in random.Random(4).choices(range(5), k=40):
        before = weights.current[copy]
        weights.rewrite(copy)
        assert weights.current[copy] is not before
    assert {int(copy.buffers["codes"][0]) for copy in weights} == {0, 1}


def test_slots_are_aligned_and_keep_the_layout():
    like = PackedOperand(
        {
            "codes": torch.arange(15, dtype=torch.int8).view(3, 5).T,
            "scales": torch.ones(3, 1, dtype=torch.float16),
            "none": torch.empty(0, dtype=torch.int32),
        },
        5,
        3,
    )
    bank, slots = Slots(like, 3), Slots(like, 2)
    bank.fill([like])
    for i in range(3):
        bank[i].buffers["codes"].add_(i)

    slots.copy_from(bank, 1, 2)

    for i, operand in enumerate((slots[0], slots[1]), start=1):
        assert operand.buffers["codes"].stride() == like.buffers["codes"].stride()
        assert torch.equal(operand.buffers["codes"], like.buffers["codes"] + i)
        assert torch.equal(operand.buffers["scales"], like.buffers["scales"])
        assert all(buffer.data_ptr() % 8 == 0 for buffer in operand.buffers.values())
    addresses = [slots[i].buffers["codes"].data_ptr() for i in range(2)]
    assert (addresses[1] - addresses[0]) % 512 == 0


@pytest.mark.parametrize(
    "operand",
    [
        quantize_symmetric(torch.randn(6, 200, generator=torch.Generator().manual_seed(0)), 6, 128),
        *(
            quantize(torch.randn(6, 200), NumberFormat.parse(name))
            for name in ("fp8/row", "nvfp4", "fp8/128x128", "mxfp6-e3m2")
        ),
        quantize_dual_grained(torch.randn(6, 256, generator=torch.Generator().manual_seed(2)), 128),
    ],
    ids=["int6", "e4m3", "nvfp4", "blocks", "mx", "dual-grained"],
)
def test_taken_rows_keep_scales_and_zero_points(operand):
    rows = torch.tensor([4, 0, 4])

    taken = operand.take_rows(rows)

    assert torch.equal(taken.dequantize(), operand.dequantize()[rows])
    both = type(operand).stacked([taken, operand])
    assert torch.equal(both.dequantize(), torch.cat([taken.dequantize(), operand.dequantize()]))


def test_checked_elements_have_references_of_all_products(fake_linear, a_case, fast):
    kernel, case = fake_linear(), a_case(m=2, n=8, k=256)
    own = realistic_inputs(kernel, case.gemm, torch.device("cpu"), seed=3)
    rewriting = Rewriting(secret=1, protocol=fast, l2_bytes=1 << 20, distinct=True)
    other = quantize_symmetric(
        torch.randn(8, 256, generator=torch.Generator().manual_seed(5)), 6, 128
    )

    bound = BoundKernel(kernel, kernel.spec, case, torch.device("cpu"))
    known = reference_of(kernel.spec, own.x, own.w)
    contents = LinearWork(bound, kernel.gemm, own, lambda: known, rewriting, seed=4)
    reference = contents.reference([own.w, other, own.w], [0, 1, 1])

    for i, (index, w) in enumerate([(0, own.w), (1, other), (1, own.w)]):
        x, w = contents.x_rows[index].dequantize(), w.dequantize()[contents.columns]
        assert torch.allclose(reference.y[i], x @ w.T)
        assert torch.allclose(reference.magnitude[i], x.abs() @ w.abs().T)
    assert torch.equal(contents.x_rows[0].dequantize(), own.x.dequantize()[contents.rows])
