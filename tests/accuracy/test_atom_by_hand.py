"""Atom computed from a checkpoint's tensors alone, in float64, against both paths of `accuracy`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from flexq_bench.accuracy.kernel_linear import KernelLinear
from flexq_bench.accuracy.quantized_cache import quantize_cache
from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes import Calibration, FakeQuantizedLinear, QuantizedLayer, resolve
from flexq_bench.schemes.activations import DynamicActivation

Floats = NDArray[np.float64]
HALF = 2.0**-11  # relative rounding error of FP16
N = 24


class ByHand:
    """A checkpoint's tensors and configuration, read without the package."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        section = self.config["quantization_config"]["flexq_bench"]
        self.entries, self.kv_bits = section["layers"], section["kv_bits"]
        self.tensors = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= load_file(file)

    def weight_codes(self, name: str) -> Floats:
        """[N, K] in the stored order: nibbles plus 8, eight a word, then the tail's bytes."""
        words = self.tensors[f"{name}.weight_packed"].view(np.uint32)
        nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
        tail = self.tensors[f"{name}.weight_tail"]
        head = nibbles.reshape(len(words), -1)[:, : self.entries[name]["shape"][1] - tail.shape[1]]
        return np.concatenate([head.astype(np.float64) - 8, tail], axis=1)

    def activation_codes(self, name: str, x: Floats) -> tuple[Floats, Floats]:
        """Codes [T, K] in the stored order, scales [T, groups], of inputs that FP16 holds."""
        entry = self.entries[name]["activation"]
        group = int(entry["format"].removeprefix("mixed4/"))
        ordered = x[:, self.tensors[f"{name}.weight_order"]]
        codes, scales = [], []
        starts = range(0, x.shape[1], group)
        for start in starts:
            columns = ordered[:, start : start + group]
            top, share = (127, 1.0) if start == starts[-1] else (7, entry["clip"])
            scale = to_half(share * np.abs(columns).max(axis=1, keepdims=True) / top)
            quotients = columns / np.where(scale == 0, np.inf, scale)
            codes.append(np.rint(quotients).clip(-top - 1, top))
            scales.append(scale)
        return np.concatenate(codes, axis=1), np.concatenate(scales, axis=1)

    def linear(self, name: str, x: Floats) -> Floats:
        """[T, N]. Unquantized layers too."""
        if name not in self.entries:
            return x @ self.tensors[f"{name}.weight"].astype(np.float64).T
        codes, scales = self.activation_codes(name, to_half(x))
        group = int(self.entries[name]["activation"]["format"].removeprefix("mixed4/"))
        of_column = np.arange(codes.shape[1]) // group
        weight = self.weight_codes(name) * self.tensors[f"{name}.weight_scale"][:, of_column]
        return (codes * scales[:, of_column]) @ weight.T

    def logits(self, ids: NDArray[np.int64], kv_bits: int) -> Floats:
        """[T, vocab] of a LLaMA."""
        heads, kv_heads = (
            self.config[f"num_{which}_heads"] for which in ("attention", "key_value")
        )
        size, tokens = self.config["head_dim"], len(ids)
        frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
        turned = np.exp(1j * np.arange(tokens)[:, None, None] * frequencies)

        def rotate(x: Floats) -> Floats:
            pairs = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turned
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        def norm(x: Floats, name: str) -> Floats:
            square = (x**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]
            return x / np.sqrt(square) * self.tensors[f"{name}.weight"]

        x = self.tensors["model.embed_tokens.weight"][ids].astype(np.float64)
        later = np.triu(np.full((tokens, tokens), -np.inf), 1)
        for block in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{block}"
            y = norm(x, f"{name}.input_layernorm")
            queries, keys, values = (
                self.linear(f"{name}.self_attn.{part}_proj", y).reshape(tokens, -1, size)
                for part in "qkv"
            )
            keys, values = rounded(rotate(keys), kv_bits), rounded(values, kv_bits)
            keys, values = (np.repeat(part, heads // kv_heads, axis=1) for part in (keys, values))
            scores = np.einsum("thd,shd->hts", rotate(queries), keys) / np.sqrt(size) + later
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            y = np.einsum("hts,shd->thd", shares, values).reshape(tokens, -1)
            x = x + self.linear(f"{name}.self_attn.o_proj", y)
            y = norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
            x = x + self.linear(f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self.linear("lm_head", norm(x, "model.norm"))


def to_half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float64)


def rounded(x: Floats, bits: int) -> Floats:
    """Keys or values [T, heads, head_dim] as a cache of these bits returns them."""
    if bits == 16:
        return x
    x = to_half(x)
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    step = to_half((high - low) / (2**bits - 1))
    return to_half(np.rint((x - low) / step).clip(0, 2**bits - 1) * step + low)


def some_inputs(order: NDArray[np.int64]) -> torch.Tensor:
    """FP32 [48, K], K the length of the order, none of them a number of FP16."""
    rng = np.random.default_rng(1)
    k = len(order)
    x = rng.standard_normal((48, k))
    x[:, rng.choice(k, 6, replace=False)] *= 60  # outlier channels
    x[0] = 0
    x[1, order[:128]] = 0  # a group of 4 bits, if K has one
    x[2, order[-(k % 128 or 128) :]] = 0  # the group of 8 bits
    x[3] = 1e-7 * np.sign(x[3])  # the scale is 0 in FP16
    x[4] = 7 * rng.choice([0.5, 1, 1.5, 2.5], k)  # quotients halfway between two codes
    x[5] *= 100
    return torch.from_numpy(x).float()


@pytest.mark.parametrize("k", [64, 128, 576, 1536])
def test_reference_and_kernel_compute_from_the_same_codes(k, tmp_path):
    generator = torch.Generator().manual_seed(k)
    order = torch.randperm(k, generator=generator)
    values = 0.1 * torch.randn(N, k, generator=generator)
    layer = QuantizedLayer(
        quantize(values, NumberFormat(4, 128, "mixed", 0.85), order=order),
        DynamicActivation(NumberFormat(4, 128, "mixed", 0.9)),
    )
    scheme = StoredScheme(name="atom-w4a4", version=2)
    extension = Extension(scheme=scheme, kv_bits=16, layers={})
    with CheckpointWriter(tmp_path / "atom", {"model_type": "llama"}, extension) as writer:
        writer.add_layer("fc", layer)
        writer.add_tensor("norm", torch.ones(1))
        writer.finish()
    stored, by_hand = open_checkpoint(tmp_path / "atom").layer("fc"), ByHand(tmp_path / "atom")
    reference, kernel = FakeQuantizedLinear("fc", stored), KernelLinear("fc", stored)
    x = some_inputs(order.numpy())

    halves = to_half(x.double().numpy())
    codes, scales = by_hand.activation_codes("fc", halves)
    expected = by_hand.linear("fc", halves)

    of_column = np.arange(k) // 128
    weight_scales = by_hand.tensors["fc.weight_scale"].astype(np.float64)[:, of_column]
    weight = by_hand.weight_codes("fc") * weight_scales
    assert np.array_equal(reference.weight.double(), weight)
    activations = stored.activation(x[:, order])
    assert np.array_equal(activations.double(), codes * scales[:, of_column])
    packed = kernel.kernel.empty_activation(len(x), k, x.device)
    packed = kernel.kernel.for_weights(packed, kernel.kernel.pack_weight(stored.weight))
    kernel.kernel.activate(x.half(), packed)
    assert np.array_equal(packed.buffers["codes"], codes)
    assert np.array_equal(packed.buffers["scales"], scales)

    sums = np.abs(codes * scales[:, of_column]) @ np.abs(weight).T  # bound rounding errors
    for inputs in (x, x.half()):
        error = np.abs(reference(inputs).double().numpy() - expected)
        rounding = HALF * np.abs(expected) if inputs.dtype == torch.float16 else 0
        assert (error <= 2.0**-20 * sums + rounding + 2.0**-25).all()
        error = np.abs(kernel(inputs).double().numpy() - expected)
        assert (error <= 2.0**-20 * sums + HALF * np.abs(expected) + 2.0**-25).all()


def test_model_equals_its_layers_with_a_rounded_cache(a_model, some_tokens, tmp_path):
    model, tokens = a_model(), some_tokens(32)
    scheme = resolve("atom-w4a4[group=16]")
    scheme.quantize(model, Calibration(some_tokens(128, seed=1).view(4, 32)))
    layers = {
        name: module.layer
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }
    with CheckpointWriter(
        tmp_path / "atom",
        model.config.to_dict(),
        Extension(
            scheme=StoredScheme(name=scheme.name, version=scheme.version),
            kv_bits=scheme.kv_bits,
            layers={},
        ),
    ) as writer:
        for name, layer in layers.items():
            writer.add_layer(name, layer)
        for name, tensor in model.named_parameters():
            tensor.data = tensor.data.half().float()
            writer.add_tensor(name, tensor.detach())
        writer.finish()
    quantize_cache(model, scheme.kv_bits)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].double().numpy()

    by_hand = ByHand(tmp_path / "atom")

    def agreeing(kv_bits):
        """Share of the tokens with equal logits; a code that flips changes those after it."""
        error = np.abs(by_hand.logits(tokens.numpy(), kv_bits) - logits).max(axis=1)
        return float((error < 1e-4 * logits.std()).mean())

    assert by_hand.kv_bits == 4
    assert agreeing(4) > 0.9
    assert agreeing(16) < 0.1
