"""Parity of kernels: every layer, every number of tokens and every configuration is launched."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from flexq_bench.accuracy.parity import (
    MOST_TOKENS,
    STEP_TOKENS,
    Choice,
    differing_weights,
    kernel_parity,
    launch_parity,
    launched_tokens,
    source_layers,
)
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.kernel_linear import through_kernels
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.kernels import registry
from flexq_bench.kernels.autotune import TuningKey
from flexq_bench.kernels.contract import Config
from flexq_bench.schemes.linear_layers import with_linear_layers
from flexq_bench.schemes.registry import resolve
from flexq_bench.workloads.models import load_catalog

CPU = torch.device("cpu")
SEGMENT = torch.arange(3, 19)
TOLERANCE = 1e-3
BROKEN = 21  # tokens


@dataclass(frozen=True, slots=True)
class Tile(Config):
    tokens: int


def under(model, scheme):
    copied = copy.deepcopy(model)
    resolve(scheme).quantize(copied)
    return copied


def wrong(launches):
    return [launch for launch in launches if launch.max_rel_error > TOLERANCE]


@pytest.fixture
def tiled(monkeypatch):
    """tiled(default, broken): w8a16 on the CPU with two configurations, one of them broken.

    default: configuration by tokens. broken: tokens for which the second one is wrong.
    """

    def make(default, broken):
        kernel = registry.resolve("w8a16", "cpu")
        gemm = kernel.gemm

        def run(x, w, out, *, bias=None, config=None):
            gemm(x, w, out, bias=bias)
            if config == Tile(2) and out.shape[0] in broken:
                out[-1] = 0

        monkeypatch.setattr(kernel, "gemm", run, raising=False)
        monkeypatch.setattr(kernel, "candidates", lambda _: [Tile(1), Tile(2)], raising=False)
        monkeypatch.setattr(kernel, "default_config", lambda gemm: default(gemm.m), raising=False)
        monkeypatch.setattr(kernel, "builds_for", lambda *_: [kernel], raising=False)
        monkeypatch.setattr(StepTuner, "_key", lambda self, kernel, gemm: key_of(gemm))
        return kernel

    return make


def key_of(gemm):
    named = {"kernel": "w8a16", "version": 1, "m": gemm.m, "n": gemm.n, "k": gemm.k}
    return TuningKey(**named, stage="decode-step", cache="cold", gpu="a GPU", software="")


def remember(folder, key, config):
    path = folder / "tuning" / "a-GPU" / f"{key.hash}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": asdict(key), "config": config.as_dict()}))


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [
        ("w6a6", {"flexq", "fp16"}),
        ("flexq-w6ax[a8=fc1]", {"flexq", "flexq[w6a8]", "fp16"}),
        ("w8a16", {"w8a16", "fp16"}),
        ("rtn-w8a8", {"cublaslt-w8a8", "fp16"}),
    ],
)
def test_kernels_follow_from_formats_with_biases_and_odd_sizes(an_opt, scheme, kernels):
    launches = list(kernel_parity(under(an_opt, scheme), SEGMENT))
    assert {launch.kernel for launch in launches} == kernels
    assert wrong(launches) == []


def test_every_layer_is_launched_and_each_shape_with_all_tokens(an_opt):
    launches = list(kernel_parity(under(an_opt, "w8a16"), SEGMENT))
    names = ("qkv_proj", "out_proj", "fc1", "fc2")
    layers = {f"block {block} {name}" for block in range(2) for name in names}
    assert {launch.layer for launch in launches} == {*layers, "lm_head"}
    counts = {launch.m for launch in launches if launch.layer == "block 0 fc1"}
    assert counts >= {*range(1, STEP_TOKENS + 1), 31, 32, 33, 128, 256, MOST_TOKENS["cpu"]}


def test_weights_that_are_not_those_of_the_codes_are_named(an_opt):
    quantized = under(an_opt, "w6a6")
    assert differing_weights(quantized) == []
    quantized.get_submodule("model.decoder.layers.1.fc2").weight[0] *= -1
    quantized.get_submodule("model.decoder.layers.0.fc1").bias[0] += 1
    assert differing_weights(quantized) == [
        "model.decoder.layers.0.fc1",
        "model.decoder.layers.1.fc2",
    ]


def test_kernels_that_computed_the_model_are_compared_too(an_opt):
    quantized = under(an_opt, "w8a16")
    through_kernels(quantized)
    assert wrong(kernel_parity(quantized, SEGMENT)) == []


@pytest.mark.parametrize("scheme", ["w4a4", "w5a6"])
def test_formats_without_a_kernel_say_why(an_opt, scheme):
    launches = [x for x in kernel_parity(under(an_opt, scheme), SEGMENT) if not x.kernel]
    assert len(launches) == 8
    assert all("no kernel" in launch.detail for launch in launches)


def test_one_wrong_row_in_the_last_block_is_found(an_opt, monkeypatch):
    quantized = under(an_opt, "w8a16")
    kernel = registry.resolve("w8a16", "cpu")
    pack, packed = kernel.pack_weight, []

    def wrongly(weight):
        packed.append(weight)
        if len(packed) == 8:  # the last layer but the head
            weight = replace(weight, scales=weight.scales.clone())
            weight.scales[3] *= 1.5
        return pack(weight)

    monkeypatch.setattr(kernel, "pack_weight", wrongly, raising=False)
    assert [launch.layer for launch in wrong(kernel_parity(quantized, SEGMENT))] == ["block 1 fc2"]


@pytest.mark.parametrize("what", ["unwritten", "beyond", "infinite"])
def test_output_that_is_not_written_or_too_long_is_found(an_opt, monkeypatch, what):
    quantized = under(an_opt, "w8a16")
    kernel = registry.resolve("w8a16", "cpu")
    gemm = kernel.gemm

    def run(x, w, out, **options):
        if what != "unwritten" or out.shape[0] != 7:
            gemm(x, w, out, **options)
        if what == "beyond" and out.shape[0] == 7:
            torch.as_strided(out, (1, 1), (1, 1), out.numel()).zero_()
        if what == "infinite" and out.shape[0] == 7:
            out[0, 0] = torch.inf

    monkeypatch.setattr(kernel, "gemm", run, raising=False)
    found = wrong(kernel_parity(quantized, SEGMENT))
    assert {launch.m for launch in found} == {7}


def test_configuration_that_begins_between_sampled_tokens_is_launched(an_opt, tiled):
    tiled(lambda m: Tile(2 if m >= BROKEN else 1), {BROKEN})
    found = wrong(kernel_parity(under(an_opt, "w8a16"), SEGMENT))
    assert {(launch.m, launch.config) for launch in found} == {(BROKEN, Tile(2))}


def test_remembered_choice_of_the_tuner_is_launched(an_opt, tiled, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    tiled(lambda m: Tile(1), {3})
    quantized = under(an_opt, "w8a16")
    assert wrong(kernel_parity(quantized, SEGMENT)) == []
    shapes = {(x.n, x.k) for x in kernel_parity(quantized, SEGMENT) if x.kernel == "w8a16"}
    for n, k in shapes:
        remember(
            tmp_path, TuningKey("w8a16", 1, 3, n, k, "decode-step", "cold", "a GPU", ""), Tile(2)
        )
    found = wrong(kernel_parity(quantized, SEGMENT))
    assert {(launch.m, launch.config) for launch in found} == {(3, Tile(2))}
    assert {(launch.n, launch.k) for launch in found} == shapes


def test_both_sides_of_a_change_of_configuration_are_launched(tiled):
    kernel = tiled(lambda m: Tile(1 if m < 300 else 2), set())
    counts = launched_tokens(kernel, Choice(lambda *_: Tile(1)), 64, 64, 512)
    assert {299, 300} <= set(counts)


def test_layers_of_an_unsupported_architecture_are_launched_one_by_one():
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2)).eval()
    quantized = under(with_linear_layers(model), "w8a16")
    launches = list(kernel_parity(quantized, SEGMENT))
    assert any("experts" in launch.layer for launch in launches)
    assert wrong(launches) == []


def test_random_weights_of_catalog_model_need_no_loaded_model():
    small = {"hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 4, "head_dim": 64, "layers": 1}
    model = replace(load_catalog()["llama-7b"], **small, vocab=64)
    source = RoundedWeights(SyntheticWeights(of_catalog(model), 0), resolve("w8a16"))
    launches = list(launch_parity(source_layers(source, 0, CPU), Choice(lambda *_: None), CPU))
    assert wrong(launches) == []
    assert len({launch.layer for launch in launches}) == 4
