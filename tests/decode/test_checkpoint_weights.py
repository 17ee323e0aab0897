"""A quantized checkpoint decodes to what torch computes from the same bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from decoders import VOCAB, Small, prompts, small_llama, small_opt

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.decode.checkpoint_weights import CheckpointWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.fused_layers import fused
from flexq_bench.decode.loading import linear_kernel, load
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.errors import UsageError
from flexq_bench.kernels.contract import LinearKernel, PackedOperand
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes import Calibration
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.model_files import model_at
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import layer_kernels, names, resolve

CPU = torch.device("cpu")
IDS = prompts(2, 10, CPU)
# K of 64 and 160: less than a group, and one with a shorter one behind it.
BUILD: dict[str, Callable[[], Small]] = {
    "llama": partial(
        small_llama, CPU, hidden_size=64, intermediate_size=160, num_attention_heads=4
    ),
    "opt": partial(small_opt, CPU, hidden_size=64, ffn_dim=160, word_embed_proj_dim=64),
}
# The same with whole blocks of 128 rows in each part of a fused layer.
BUILD |= {
    "llama in blocks": partial(
        small_llama, CPU, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=4,
    ),
    "opt in blocks": partial(small_opt, CPU, hidden_size=128, ffn_dim=256, word_embed_proj_dim=128),
}  # fmt: skip
# Options that change how long a calibration takes, not the formats, by the beginning of a name.
QUICK = {
    "omniquant": "epochs=1",
    "abq": "epochs=1",
    "dgq-w4a8": "group_steps=3,row_steps=3",
    "dual-w6a8": "row_steps=3",
    "awq": "steps=4,clip_steps=2",
    "autoround": "steps=20",
}
# Beside the examples of the registry: in formats that a kernel has.
ALSO = ("gptq-w4a16[symmetric=true]", "awq-w4a16[symmetric=true]", "atom-w4a4")


def with_kernels():
    """Examples that kernels run: of each method one with each kernel, as LLaMA, and as OPT one of
    each kernel.
    """
    schemes = [resolve(name) for name in (*names(), *ALSO)]
    cases, seen = [], set()
    for scheme in schemes:
        for kind, gated in (("llama", True), ("opt", False)):
            layers = layer_kernels(scheme, gated=gated)
            if any(layer.formats.rotated for layer in layers):
                continue  # decode refuses them
            labels = tuple(layer.kernel for layer in layers)
            method = type(scheme).__name__ if gated else ""
            if scheme.name != "fp16" and all(labels) and (labels, method) not in seen:
                seen.add((labels, method))
                in_blocks = any(layer.formats.weight.block_rows != 1 for layer in layers)
                cases.append((f"{kind} in blocks" if in_blocks else kind, _quick(scheme.name)))
    return cases


def _quick(name):
    """The same with a calibration that takes no time."""
    options = next((given for start, given in QUICK.items() if name.startswith(start)), "")
    if not options:
        return name
    return f"{name[:-1]},{options}]" if name.endswith("]") else f"{name}[{options}]"


@dataclass(frozen=True)
class Stored:
    """A small model, and the checkpoint that a scheme made of it."""

    small: Small
    checkpoint: QuantizedCheckpoint


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    @cache
    def saved(kind):
        small, folder = BUILD[kind](), tmp_path_factory.mktemp(kind)
        small.reference.save_pretrained(folder)
        return small, folder

    @cache
    def make(kind, name):
        small, folder = saved(kind)
        scheme, out = resolve(name), tmp_path_factory.mktemp("checkpoints") / "checkpoint"
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(3, VOCAB, (2, 24), generator=generator)
        quantize_checkpoint(
            open_source(model_at(folder)),
            scheme,
            out,
            calibration=Calibration(tokens) if scheme.needs_calibration else None,
            device=CPU,
            dtype=torch.float32,
        )
        return Stored(small, open_checkpoint(out))

    return make


class InTorch(LinearKernel):
    """The layer of an evaluation through the reference, in place of a kernel."""

    def __init__(self, kernel):
        self.spec = kernel.spec
        self._layers = {}

    def pack_weight(self, weight):
        number = self.spec.activation
        activation = None if number.is_dense else DynamicActivation(number)
        layer = FakeQuantizedLinear("layer", QuantizedLayer(weight, activation))
        self._layers[weight.values.data_ptr()] = layer
        return PackedOperand({"values": weight.values}, weight.rows, weight.k)

    def pack_activation(self, x):
        return PackedOperand({"values": x.values}, x.rows, x.k)

    def empty_activation(self, m, k, device):
        return PackedOperand({"values": torch.zeros(m, k, dtype=torch.float16)}, m, k)

    def activate(self, x, packed):
        packed.buffers["values"].copy_(x)

    def gemm(self, x, w, out, *, bias=None, config=None):
        y = self._layers[w.buffers["values"].data_ptr()](x.buffers["values"].float())
        out.copy_(y if bias is None else y + bias.float())


def logits(source, kv_bits=16, instead=None):
    def find(label, backend):
        kernel = linear_kernel(label, backend)
        return kernel if instead is None else instead(kernel)

    model = load(source, CPU, 64, lambda *_: None, (2,), find=find)
    engine = Engine(
        model, TorchOperations(), lambda *_: None, slots=2, capacity=64, kv_bits=kv_bits
    )
    return engine.logits(IDS).float()


@torch.no_grad()
def in_transformers(stored, kv_bits=16):
    """Transformers' FP16 forward pass, quantized layers in torch."""
    model: Any = copy.deepcopy(stored.small.reference)
    for name in stored.checkpoint.layers:
        replace_module(model, name, FakeQuantizedLinear(name, stored.checkpoint.layer(name)))
    tensors = {name: stored.checkpoint.tensor(name) for name in stored.checkpoint.tensor_names}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    quantize_cache(model, kv_bits)
    return model(IDS.long()).logits.float()


def rms(values):
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize(("kind", "name"), with_kernels())
def test_logits_equal_those_of_the_codes_in_torch(stored, kind, name):
    made = stored(kind, name)
    source = CheckpointWeights(made.checkpoint)
    got, in_torch, whole = logits(source), logits(source, instead=InTorch), in_transformers(made)
    with torch.no_grad():
        effect = rms(whole - made.small.reference(IDS.long()).logits.float())

    # A sum near the middle of two FP16 numbers may go either way, and the next code with it.
    assert rms(got - in_torch) <= 2e-3 + 0.25 * effect
    # Norms of transformers round otherwise, so that more do.
    assert rms(got - whole) <= 2e-3 + 0.6 * effect


@pytest.mark.parametrize(
    "name",
    ["smoothquant-w8a8", "dgq-w4a8", "awq-w4a16[symmetric=true]", "atom-w4a4"],
)
def test_calibration_affects_the_decoded_weights(stored, name):
    made = stored("llama", _quick(name))
    with_it, with_other = (
        CheckpointWeights(made.checkpoint),
        RoundedWeights(made.small.source, resolve(name)),
    )

    assert with_it.formats() == {
        layer: replace(formats, weight=replace(formats.weight, clip=1.0))
        for layer, formats in with_other.formats().items()
    }
    assert rms(logits(with_it) - logits(with_other)) > 5e-3


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_cache_is_rounded_as_in_accuracy(stored, kind, kv_bits):
    made = stored(kind, "w8a16")
    source = CheckpointWeights(made.checkpoint)
    got = logits(source, kv_bits)

    assert rms(got - in_transformers(made, kv_bits)) < 0.5 * rms(got - logits(source))


def test_fused_layer_keeps_the_codes_of_its_parts(stored):
    checkpoint = stored("opt", "w6a6").checkpoint
    names = [f"model.decoder.layers.1.self_attn.{kind}_proj" for kind in "qkv"]
    parts = [checkpoint.layer(name) for name in names]

    whole = CheckpointWeights(checkpoint).block(1, CPU).linears["qkv_proj"]

    assert torch.equal(whole.weight.values, torch.cat([part.weight.values for part in parts]))
    assert torch.equal(whole.weight.scales, torch.cat([part.weight.scales for part in parts]))
    assert torch.equal(whole.bias, torch.cat([part.bias for part in parts]))


def test_different_parts_are_not_fused():
    weight = torch.randn(4, 160, generator=torch.Generator().manual_seed(0))
    six, eight = (quantize(weight, NumberFormat(bits, 128)) for bits in (6, 8))
    activation = DynamicActivation(NumberFormat(6, 128))
    first = QuantizedLayer(six, activation)

    with pytest.raises(UsageError, match=r"q is int6/128 x int6/128 and k is int8/128 x .* alike"):
        fused([("q", first), ("k", QuantizedLayer(eight, activation))])
    mixed = NumberFormat(4, 128, "mixed")
    q, k = (
        QuantizedLayer(quantize(weight, mixed, order=order), DynamicActivation(mixed))
        for order in (torch.arange(160), torch.arange(160).flip(0))
    )
    with pytest.raises(UsageError, match="q and k round or order their common input differently"):
        fused([("q", q), ("k", k)])
    biased = QuantizedLayer(six, activation, torch.ones(4, dtype=torch.float16))
    bias = fused([("q", first), ("k", biased)]).bias
    assert bias.tolist() == [0.0] * 4 + [1.0] * 4


def test_a_layer_without_a_kernel_is_named(stored):
    made = stored("llama", "w5a16")

    with pytest.raises(UsageError, match="qkv_proj of llama0, block 0 is int5/128 x fp16: no"):
        logits(CheckpointWeights(made.checkpoint))


def test_dense_layers_run_in_fp16(stored):
    made = stored("llama", "w8a16")
    kept = "model.layers.1.mlp.down_proj"
    checkpoint = copy.copy(made.checkpoint)
    dense = made.small.reference.get_submodule(kept).weight.detach()
    checkpoint.layers = tuple(name for name in checkpoint.layers if name != kept)
    checkpoint.tensor_names = (*checkpoint.tensor_names, f"{kept}.weight")
    read = made.checkpoint.tensor
    checkpoint.tensor = lambda name: dense if name.startswith(kept) else read(name)

    model = load(CheckpointWeights(checkpoint), CPU, 64, lambda *_: None, (1,))

    assert model.kernels()["down_proj"] == "w8a16,fp16"


def test_a_checkpoint_of_another_shape_is_refused(stored):
    checkpoint = copy.copy(stored("llama", "w8a16").checkpoint)
    checkpoint.config = {**checkpoint.config, "intermediate_size": 128}

    with pytest.raises(UsageError, match=r"gate_proj is \[160, 64\], its config\.json asks for"):
        CheckpointWeights(checkpoint).formats()

    checkpoint.config = {**checkpoint.config, "num_hidden_layers": 1}
    with pytest.raises(UsageError, match=r"9 weights that its config\.json has no place for"):
        CheckpointWeights(checkpoint)
