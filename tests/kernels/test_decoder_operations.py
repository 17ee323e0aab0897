"""The kernels between a decoder's layers: that they compile, and how they are launched."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.contract import Packing
from flexq_bench.kernels.decoder import AttentionShape, kv
from flexq_bench.kernels.decoder.attention import (
    attention_build,
    can_pack,
    is_serial,
    split_count,
    tiles,
)
from flexq_bench.kernels.decoder.cuda_operations import node_build
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.runtime.machine_code import resources
from flexq_bench.kernels.runtime.nvrtc import compile_build

NORM, SILU_MUL, ATTENTION_SUM = 1, 3, 5
HALVES = Packing("halves", 16, torch.empty(0))
CODES = Packing("group-codes", 6, torch.empty(0))


@pytest.mark.parametrize(
    "build",
    [
        node_build(NORM, "group-codes", 6, 5, 256, splits_row=True),
        node_build(SILU_MUL, "row-codes", 8, 4, 1024),
        node_build(ATTENTION_SUM, "group-codes", 8, 1, 128),
        attention_build(AttentionShape(1, 1, 128, torch.empty(0)), 16, HALVES),
        attention_build(AttentionShape(8, 1, 128, torch.empty(0)), 8, CODES),
        attention_build(AttentionShape(3, 1, 64, None), 4, None),
    ],
    ids=lambda build: build.name,
)
def test_they_compile_without_spilling(build):
    for usage in resources(compile_build(build, "sm_90")).values():
        assert usage.stack_bytes == 0


@pytest.mark.parametrize(
    ("blocks", "tokens", "splits"),
    [
        *((40, 1024, 8), (40 * 4, 1024, 2), (40 * 64, 1024, 1)),  # the more sequences, the fewer
        *((8, 1, 1), (8, 128, 2), (8, 2048, 8)),  # the shorter, the fewer
        (8, 32768, 32),  # only long sequences have more than a cluster
    ],
)
def test_splits_follow_sequences_and_their_length(blocks, tokens, splits):
    assert split_count(blocks, tokens, 132) == splits


@pytest.mark.parametrize(("longest", "splits"), [(1, 1), (512, 1), (513, 2), (1500, 4), (9000, 8)])
def test_invariant_splits_follow_the_length_alone(longest, splits):
    assert split_count(1, longest, 132, 512) == split_count(999, longest, 80, 512) == splits


def test_warp_loads_as_many_tiles_as_registers_hold():
    assert [tiles(128, bits) for bits in kv.KV_BITS] == [1, 2, 4]
    assert [tiles(256, bits) for bits in kv.KV_BITS] == [1, 1, 2]


def test_only_more_blocks_than_fit_compute_splits_in_turn():
    shape = AttentionShape(9, 3, 64, None)

    assert not is_serial(shape, 32, 4, 132)
    assert is_serial(shape, 128, 2, 132)
    assert not is_serial(AttentionShape(64, 8, 128, None), 128, 8, 132)


def test_attention_packs_heads_of_whole_groups():
    rows = Packing("row-codes", 8, torch.empty(0))

    assert can_pack(CODES, AttentionShape(8, 1, 128, None))
    assert can_pack(HALVES, AttentionShape(9, 3, 64, None))
    assert not can_pack(CODES, AttentionShape(9, 3, 64, None))
    assert not can_pack(HALVES, AttentionShape(8, 1, 256, None))
    assert not can_pack(rows, AttentionShape(8, 1, 128, None))


def test_heads_that_no_warp_holds_are_refused():
    with pytest.raises(UnsupportedError, match="got 300 and 1"):
        attention_build(AttentionShape(1, 1, 300, None), 16, None)
    with pytest.raises(UnsupportedError, match="got 128 and 16"):
        attention_build(AttentionShape(16, 1, 128, None), 16, None)


@pytest.mark.parametrize("bits", [8, 4])
def test_cache_of_codes_rounds_between_extremes_of_a_head(bits):
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).half()
    codes, scales = kv.encode(x, bits)

    assert codes.shape == (5, 3, 64 * bits // 8)
    whole, top = x.double(), 2**bits - 1
    low, high = whole.amin(-1, keepdim=True), whole.amax(-1, keepdim=True)
    step = ((high - low) / top).half().double()
    expected = ((whole - low) / step).round().clamp(0, top) * step + low
    torch.testing.assert_close(
        kv.decode(codes, scales, bits).double(), expected, rtol=2**-10, atol=1e-6
    )


def test_a_constant_head_is_its_least_value():
    codes, scales = kv.encode(torch.full((1, 16), 0.5).half(), 8)

    assert torch.equal(kv.decode(codes, scales, 8), torch.full((1, 16), 0.5))


def test_a_width_that_no_kernel_reads_is_refused():
    with pytest.raises(ShapeError, match="16, 8 or 4 bits, got 5"):
        kv.empty_layer(1, 1, 8, 64, 5, torch.device("cpu"))


def test_pick_appends_first_most_likely_token_up_to_capacity():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, -1.0]]).half()
    tokens, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    history = torch.full((3, 4), -1)

    TorchOperations().pick(logits, tokens, positions, history)

    assert tokens.tolist() == [1, 0]
    assert positions.tolist() == [2, 3]
    assert history.tolist() == [[-1, -1, 1, -1], [-1, -1, -1, 0], [-1] * 4]
