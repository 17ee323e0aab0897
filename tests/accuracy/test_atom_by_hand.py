"""Atom computed from a checkpoint's tensors alone, in float64, against both paths of `accuracy`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes import FakeQuantizedLinear, QuantizedLayer
from flexq_bench.schemes.activations import DynamicActivation

Floats = NDArray[np.float64]
HALF = 2.0**-11  # relative rounding error of FP16
N = 24


class ByHand:
    """A checkpoint's tensors and configuration, read without the package."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        section = config["quantization_config"]["flexq_bench"]
        self.entries = section["layers"]
        self.tensors = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= load_file(file)

    def weight_codes(self, name):
        """[N, K] in the stored order: nibbles plus 8, eight a word, then the tail's bytes."""
        words = self.tensors[f"{name}.weight_packed"].view(np.uint32)
        nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
        tail = self.tensors[f"{name}.weight_tail"]
        head = nibbles.reshape(len(words), -1)[:, : self.entries[name]["shape"][1] - tail.shape[1]]
        return np.concatenate([head.astype(np.float64) - 8, tail], axis=1)

    def activation_codes(self, name, x):
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

    def linear(self, name, x):
        """[T, N]."""
        codes, scales = self.activation_codes(name, to_half(x))
        group = int(self.entries[name]["activation"]["format"].removeprefix("mixed4/"))
        of_column = np.arange(codes.shape[1]) // group
        weight = self.weight_codes(name) * self.tensors[f"{name}.weight_scale"][:, of_column]
        return (codes * scales[:, of_column]) @ weight.T


def to_half(x):
    return x.astype(np.float16).astype(np.float64)


def some_inputs(order):
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
