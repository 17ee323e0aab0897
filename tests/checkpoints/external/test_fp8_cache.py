"""A folder with an FP8 KV cache is evaluated and decoded with it (kv_cache_scheme)."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.kernels.decoder.kv import fp8_rounded

CPU = torch.device("cpu")
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SECTION = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": W8}},
    "ignore": ["lm_head"],
}
TOKENS = torch.arange(5, 69)[None]


@pytest.fixture
def cached(a_folder):
    """cached(scale): tiny-llama in INT8 whose caches have this scale; None: no such cache."""

    def quantized(_, weight):
        scale = weight.float().abs().amax(1, keepdim=True).div(127).half()
        return {"weight": (weight / scale).round().char(), "weight_scale": scale}

    def build(scale, blocks=2):
        section = SECTION | ({} if scale is None else {"kv_cache_scheme": CACHE})
        scales = {
            f"model.layers.{block}.self_attn.{part}_scale": torch.tensor([scale])
            for block in range(blocks if scale is not None else 0)
            for part in "kv"
        }
        return open_checkpoint(
            a_folder(section, quantized, change=lambda tensors: tensors | scales)
        )

    return build


def logits(checkpoint, through="reference"):
    loaded = load_checkpoint(checkpoint, device=CPU, through=through)
    with torch.no_grad():
        return loaded.model(TOKENS).logits.float()


def divergence(base, other):
    """Mean KL divergence of the predictions, nats."""
    first, second = (torch.log_softmax(values, -1) for values in (base, other))
    return float((first.exp() * (first - second)).sum(-1).mean())


@pytest.mark.parametrize("through", ["reference", "kernels"])
def test_damaged_scales_of_the_cache_change_predictions(cached, through):
    dense, whole, damaged = (logits(cached(scale), through) for scale in (None, 0.05, 2e-4))
    assert 0 < divergence(dense, whole) < 0.01 < divergence(dense, damaged)


def test_kernels_round_the_cache_as_the_reference(cached):
    checkpoint = cached(0.05)
    assert divergence(logits(checkpoint), logits(checkpoint, "kernels")) < 1e-4


def test_values_are_the_nearest_of_e4m3():
    x, scale = torch.randn(1, 2, 512).half() * 8, torch.tensor([0.02, 0.001])[:, None]
    expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(fp8_rounded(x, scale), expected.half())


@pytest.mark.parametrize("scale", [0.0, float("nan"), -1.0])
def test_scale_that_is_none_is_refused(cached, scale):
    with pytest.raises(CheckpointError, match="holds NaN, infinity or 0"):
        cached(scale)


def test_missing_scales_are_refused(cached):
    with pytest.raises(CheckpointError, match=r"FP8 cache for 1 of 2 blocks"):
        cached(0.05, blocks=1)


def fp8_weight(_, weight):
    scale = weight.float().abs().amax() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


@pytest.mark.parametrize(
    ("settings", "keys", "values"),
    [
        ({"kv_cache_scheme": "static"}, "k_scale", "v_scale"),
        ({"kv_cache_scheme": "static"}, "kv_scale", "kv_scale"),
        (
            {"kv_cache_quant_targets": ["k_proj", "v_proj"]},
            "k_proj.output_scale",
            "v_proj.output_scale",
        ),
    ],
)
def test_caches_of_fp8_folders_are_read(a_folder, settings, keys, values):
    scales = {
        f"model.layers.{block}.self_attn.{name}": torch.tensor(scale)
        for block in range(2)
        for name, scale in ((keys, 0.25), (values, 0.25 if keys == values else 0.5))
    }
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"} | settings

    checkpoint = open_checkpoint(a_folder(section, fp8_weight, change=lambda t: t | scales))

    read = checkpoint.fp8_cache_scales(1).flatten().tolist()
    assert read == [0.25, 0.25 if keys == values else 0.5]
    assert not [name for name in checkpoint.tensor_names if "scale" in name]


def test_scales_of_a_cache_that_nothing_asks_for_are_reported(a_folder, caplog):
    scales = {
        f"model.layers.{block}.self_attn.{part}_scale": torch.tensor(0.1)
        for block in range(2)
        for part in "kv"
    }
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}

    checkpoint = open_checkpoint(a_folder(section, fp8_weight, change=lambda t: t | scales))

    assert checkpoint.fp8_cache_scales(0) is None
    assert "nothing in its config.json asks for one" in caplog.text
