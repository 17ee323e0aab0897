"""Codes of 2 to 8 bits as a stream of 32-bit words without gaps: the layout of
`compressed-tensors`.

Code j of a row occupies bits j · bits … (j + 1) · bits - 1 of it, lowest first, and may cross from
one word into the next (compressed-tensors 0.20, `pack_to_int32`, along K; along rows for zero
points). A row of K codes takes ceil(K · bits / 32) words. 32 codes fill `bits` words exactly.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1


def words_of(codes: int, bits: int) -> int:
    """Number of words for this many codes of a row."""
    return -(-codes * bits // _WORD_BITS)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [rows, K] in 0 … 2^bits - 1, of any integer type: int32 [rows, words]."""
    rows, k = codes.shape
    padded = functional.pad(codes, (0, -k % _WORD_BITS)) if k % _WORD_BITS else codes
    grouped = padded.reshape(rows, -1, _WORD_BITS)
    words = torch.zeros(rows, grouped.shape[1], bits, dtype=torch.int64, device=codes.device)
    for place in range(_WORD_BITS):
        word, shift = divmod(place * bits, _WORD_BITS)
        code = grouped[:, :, place].to(torch.int64)
        words[:, :, word] |= code << shift & _WORD_MASK
        if shift + bits > _WORD_BITS:
            words[:, :, word + 1] |= code >> (_WORD_BITS - shift)
    signed = torch.where(words > _WORD_MASK >> 1, words - (1 << _WORD_BITS), words).to(torch.int32)
    return signed.view(rows, -1)[:, : words_of(k, bits)].contiguous()


def unpack_codes(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The codes of `pack_codes`, uint8 [rows, K]. words: int32 [rows, words_of(k, bits)]."""
    rows, count = words.shape
    padded = functional.pad(words, (0, -count % bits)) if count % bits else words
    grouped = padded.reshape(rows, -1, bits)
    shape = (rows, grouped.shape[1], _WORD_BITS)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for place in range(_WORD_BITS):
        word, shift = divmod(place * bits, _WORD_BITS)
        code = (grouped[:, :, word].to(torch.int64) & _WORD_MASK) >> shift
        if shift + bits > _WORD_BITS:
            code |= grouped[:, :, word + 1].to(torch.int64) << (_WORD_BITS - shift)
        codes[:, :, place] = (code & mask).to(torch.uint8)
    return codes.view(rows, -1)[:, :k].contiguous()
