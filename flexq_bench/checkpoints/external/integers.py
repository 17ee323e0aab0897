"""Integer codes in checkpoints of other tools: zero points, order of channels, scales."""

from __future__ import annotations

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.asymmetric import asymmetric_types

_WORD_BITS = 32  # bits of an int32


def unpack_whole_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes that do not cross words: the top bits of a word are unused.

    words: int32 [rows, ceil(count / (32 // bits))]. Returns uint8 [rows, count]. compressed-tensors
    used this layout before version 0.18; for 2, 4 and 8 bits it is that of `packing.unpack_codes`.
    """
    per_word = _WORD_BITS // bits
    codes = torch.empty((*words.shape, per_word), dtype=torch.uint8, device=words.device)
    for place in range(per_word):
        codes[:, :, place] = (words >> place * bits & (1 << bits) - 1).to(torch.uint8)
    return codes.flatten(1)[:, :count].contiguous()


def unpack_rows(packed: torch.Tensor, bits: int, per_word: int) -> torch.Tensor:
    """Unpack codes of distant rows from words: [rows, columns] to uint8 [rows · per_word, columns].

    Place i of a word, bits i · bits and above, holds the code of a row i · rows further down.
    """
    places = [(packed >> place * bits & (1 << bits) - 1) for place in range(per_word)]
    return torch.cat(places).to(torch.uint8)


def integer_operand(
    codes: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    bits: int,
    group: int | None,
    order: torch.Tensor | None = None,
) -> Operand:
    """Weights scale · (code - zero). Symmetric if every zero is the middle code.

    codes:  uint8 [N, K], 0 … 2^bits - 1, already in `order`.
    zeros:  uint8 [N, groups], codes that mean 0; None: 2^(bits-1), the middle.
    scales: of `exact_scales`, [N, groups].
    """
    middle: int = 1 << (bits - 1)
    if zeros is None or bool((zeros == middle).all()):
        signed = (codes.to(torch.int16) - middle).to(torch.int8)
        return Operand(signed, scales, bits, group, order=order)
    of_codes, of_zeros = asymmetric_types(bits)
    return Operand(
        codes.to(of_codes), scales, bits, group, -zeros.to(torch.int16).to(of_zeros), order=order
    )


def channel_order(group_of: torch.Tensor, group: int, layer: str) -> torch.Tensor | None:
    """Order of channels in which those of one group are consecutive; None: they already are.

    group_of: integers [K], the group of per_word channel (`g_idx`: GPTQ's activation order). Raises
    CheckpointError if any group except the last has a number of channels other than `group`.
    """
    of_channel = group_of.long()
    together = torch.arange(of_channel.shape[0], device=group_of.device) // group
    if torch.equal(of_channel, together):
        return None
    order = torch.argsort(of_channel, stable=True)
    if not torch.equal(of_channel[order], together):
        raise CheckpointError(
            f"{layer}: its activation order doesn't make groups of {group} channels: quantize it "
            "again without one (desc_act=False)"
        )
    return order.to(torch.int32)


def exact_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Scales as FP16 if that is exact for all of them, otherwise as they are stored.

    Raises CheckpointError if one is NaN, infinite or negative, or all of them are 0. Single zeros
    are allowed: some tools write them for weights that are all 0.
    """
    wide = scales.float()
    if not bool(torch.isfinite(wide).all()):
        raise CheckpointError(f"{name} holds NaN or infinity: copy it again")
    if not bool(wide.any()):
        raise CheckpointError(f"{name} holds nothing but zeros: copy it again")
    halved = scales.to(torch.float16)
    return halved if torch.equal(halved.float(), wide) else scales
