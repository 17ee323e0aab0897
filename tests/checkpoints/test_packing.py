"""Codes of 2 to 8 bits in 32-bit words."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from flexq_bench.checkpoints.packing import pack_codes, unpack_codes


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("k", [1, 31, 32, 100])
def test_packed_words_are_those_of_compressed_tensors(bits, k):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, k), generator=generator)

    words = pack_codes(codes, bits)

    signed = (codes - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_codes(words, bits, k), codes.to(torch.uint8))
