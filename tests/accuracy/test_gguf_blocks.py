"""Quantized blocks of GGUF files, decoded here by the formulas of ggml's layouts.

The product reads them with the gguf package; nothing of it decodes the expected values. Sizes and
fields are those of ggml-common.h, the formulas those of dequantize_row_* in ggml-quants.c. A block
is a row of bytes [blocks, bytes]; each function returns FP32 [blocks, values].
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.streaming import without_weights
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import find_model

gguf = pytest.importorskip("gguf", reason="GGUF files need flexq-bench[accuracy]")
CPU = torch.device("cpu")
F32 = np.float32
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], F32)  # twice the number


def half(block, at):
    """FP16 at this byte, as FP32 [blocks, 1]."""
    return np.ascontiguousarray(block[:, at : at + 2]).view(np.float16).astype(F32)


def word(block, at, kind):
    return np.ascontiguousarray(block[:, at : at + np.dtype(kind).itemsize]).view(kind)


def halves_of(codes):
    """The lower four bits of all bytes, then the upper ones."""
    return np.concatenate([codes & 15, codes >> 4], 1)


def fifth_bits(block, at):
    return word(block, at, "<u4") >> np.arange(32, dtype=np.uint32) & 1


def q4_0(b):
    return (halves_of(b[:, 2:]).astype(F32) - 8) * half(b, 0)


def q4_1(b):
    return halves_of(b[:, 4:]).astype(F32) * half(b, 0) + half(b, 2)


def q5_0(b):
    codes = halves_of(b[:, 6:]) + 16 * fifth_bits(b, 2)
    return (codes.astype(F32) - 16) * half(b, 0)


def q5_1(b):
    return (halves_of(b[:, 8:]) + 16 * fifth_bits(b, 4)).astype(F32) * half(b, 0) + half(b, 2)


def q8_0(b):
    return b[:, 2:].view(np.int8).astype(F32) * half(b, 0)


def q2_k(b):
    scales, codes, d, least = b[:, :16], b[:, 16:80], half(b, 80), half(b, 82)
    parts = [
        d * (scales[:, [i]] & 15) * codes_at(codes, i) - least * (scales[:, [i]] >> 4)
        for i in range(16)
    ]
    return np.concatenate(parts, 1)


def codes_at(codes, part):
    """Two-bit codes of the 16 values of a part: 8 parts for each 32 bytes."""
    start = 32 * (part // 8) + 16 * (part % 2)
    return (codes[:, start : start + 16] >> 2 * (part % 8 // 2) & 3).astype(F32)


def q3_k(b):
    high, codes, scales, d = b[:, :32], b[:, 32:96], b[:, 96:108], half(b, 108)
    parts = []
    for i in range(16):
        low = scales[:, [i % 8]] >> 4 * (i // 8) & 15
        scale = (low | (scales[:, [8 + i % 4]] >> 2 * (i // 4) & 3) << 4).astype(F32) - 32
        third = high[:, 16 * (i % 2) : 16 * (i % 2) + 16] >> i // 2 & 1
        parts.append(d * scale * (codes_at(codes, i) - 4 * (1 - third.astype(F32))))
    return np.concatenate(parts, 1)


def scale_and_least(s, j):
    """The j-th of eight pairs of six bits in twelve bytes."""
    if j < 4:
        return s[:, [j]] & 63, s[:, [j + 4]] & 63
    low, up = s[:, [j + 4]], s[:, [j - 4]] >> 6 << 4
    return low & 15 | up, low >> 4 | s[:, [j]] >> 6 << 4


def k_of_4_or_5(b, codes_at_byte, fifth=None):
    d, least, scales, parts = half(b, 0), half(b, 2), b[:, 4:16], []
    for j in range(8):
        start = codes_at_byte + 32 * (j // 2)
        codes = b[:, start : start + 32] >> 4 * (j % 2) & 15
        if fifth is not None:
            codes = codes + 16 * (b[:, fifth : fifth + 32] >> j & 1)
        scale, minimum = scale_and_least(scales, j)
        parts.append(d * scale * codes.astype(F32) - least * minimum)
    return np.concatenate(parts, 1)


def q4_k(b):
    return k_of_4_or_5(b, 16)


def q5_k(b):
    return k_of_4_or_5(b, 48, fifth=16)


def q6_k(b):
    scales, d, parts = b[:, 192:208].view(np.int8), half(b, 208), []
    for i in range(16):  # of 16 values
        run, inside = i % 8 // 2, 16 * (i % 2)
        low = b[:, 64 * (i // 8) + 32 * (run % 2) + inside :][:, :16] >> 4 * (run // 2) & 15
        high = b[:, 128 + 32 * (i // 8) + inside :][:, :16] >> 2 * run & 3
        parts.append(d * scales[:, [i]] * ((low | high << 4).astype(F32) - 32))
    return np.concatenate(parts, 1)


def iq4_nl(b):
    return IQ4[halves_of(b[:, 2:])] * half(b, 0)


def iq4_xs(b):
    high, parts = word(b, 2, "<u2"), []
    for i in range(8):
        low = b[:, [4 + i // 2]] >> 4 * (i % 2) & 15
        scale = (low | (high >> 2 * i & 3) << 4).astype(F32) - 32
        parts.append(half(b, 0) * scale * IQ4[halves_of(b[:, 8 + 16 * i : 24 + 16 * i])])
    return np.concatenate(parts, 1)


def mxfp4(b):
    return E2M1[halves_of(b[:, 1:])] * 2.0 ** (b[:, [0]].astype(F32) - 128)


def thirds(codes, digits):
    """Digits of base 3, each of all bytes before the next; a byte is digits / 3^5 of 256."""
    parts = [((codes * 3**n).astype(np.uint8).astype(np.uint16) * 3) >> 8 for n in range(digits)]
    return np.concatenate(parts, 1).astype(F32) - 1


def tq1_0(b):
    digits = [thirds(b[:, :32], 5), thirds(b[:, 32:48], 5), thirds(b[:, 48:52], 4)]
    return np.concatenate(digits, 1) * half(b, 52)


def tq2_0(b):
    parts = [b[:, at : at + 32] >> 2 * place & 3 for at in (0, 32) for place in range(4)]
    return (np.concatenate(parts, 1).astype(F32) - 1) * half(b, 64)


# Bytes of a block, values of it, where its FP16 numbers are.
TYPES = {
    "Q4_0": (q4_0, 18, 32, (0,)),
    "Q4_1": (q4_1, 20, 32, (0, 2)),
    "Q5_0": (q5_0, 22, 32, (0,)),
    "Q5_1": (q5_1, 24, 32, (0, 2)),
    "Q8_0": (q8_0, 34, 32, (0,)),
    "Q2_K": (q2_k, 84, 256, (80, 82)),
    "Q3_K": (q3_k, 110, 256, (108,)),
    "Q4_K": (q4_k, 144, 256, (0, 2)),
    "Q5_K": (q5_k, 176, 256, (0, 2)),
    "Q6_K": (q6_k, 210, 256, (208,)),
    "IQ4_NL": (iq4_nl, 18, 32, (0,)),
    "IQ4_XS": (iq4_xs, 136, 256, (0,)),
    "MXFP4": (mxfp4, 17, 32, ()),
    "TQ1_0": (tq1_0, 54, 256, (52,)),
    "TQ2_0": (tq2_0, 66, 256, (64,)),
}
WIDE, ROWS = 256, 256
LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PLACES = [(block, layer) for block in range(3) for layer in LAYERS]
CONFIG = LlamaConfig(
    hidden_size=WIDE,
    intermediate_size=ROWS,
    num_hidden_layers=3,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=64,
)


def random_blocks(name):
    """Bytes [rows, bytes a row]: every code, and FP16 scales of usual sizes."""
    _, size, values, halves = TYPES[name]
    generator = np.random.default_rng(size + values)
    blocks = generator.integers(0, 256, (ROWS * WIDE // values, size), dtype=np.uint8)
    for at in halves:
        scales = generator.uniform(1e-4, 1e-2, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(100, 140, len(blocks))
    return blocks


def test_blocks_of_every_type_equal_their_formulas(gguf_writer, tmp_path):
    path, stored = tmp_path / "model.gguf", {}
    with gguf_writer(path, "llama", CONFIG, 513) as writer:
        for (block, layer), name in zip(PLACES, [*TYPES, *list(TYPES)[:6]], strict=True):
            blocks = random_blocks(name)
            stored[f"model.layers.{block}.{LAYERS[layer]}.weight"] = name, blocks
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(
                f"blk.{block}.{layer}.weight", blocks.reshape(ROWS, -1), raw_dtype=kind
            )
        writer.add_tensor("token_embd.weight", np.ones((513, WIDE), F32))
        norms = [f"blk.{block}.{norm}_norm" for block in range(3) for norm in ("attn", "ffn")]
        for name in (*norms, "output_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(WIDE, F32))
    source = open_source(find_model(str(path)))
    model = without_weights(source)
    source.bind(model, linear_origins(model))

    read = {name: values.float().numpy() for name, values in source.read(list(stored), CPU)}

    for full, (name, blocks) in stored.items():
        expected = TYPES[name][0](blocks).reshape(ROWS, WIDE)
        if full.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighbouring rows
            expected = expected.reshape(ROWS // 2, 2, WIDE).swapaxes(0, 1).reshape(ROWS, WIDE)
        assert np.array_equal(read[full], expected), f"{full} of {name}"
