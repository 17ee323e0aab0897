"""MLX's folders, packed here as mlx.core.quantize does: modes, bits, settings of single layers."""

from __future__ import annotations

import json

import pytest
import torch

from flexq_bench.checkpoints.reader import open_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DENSE, EIGHT = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def words(codes, bits):
    """Codes [rows, K] in 32-bit words without gaps, the lowest bits first."""
    rows, _ = codes.shape
    stream = (codes[:, :, None] >> torch.arange(bits) & 1).reshape(rows, -1, 32)
    return (stream << torch.arange(32)).sum(2).to(torch.uint32)


@pytest.fixture
def mlx_folder(a_folder):
    """mlx_folder(settings, quantized): its settings are `quantization`, as mlx_lm writes them."""

    def build(settings, quantized):
        folder = a_folder({}, quantized)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config | {"quantization": settings}))
        return open_checkpoint(folder)

    return build


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_affine_codes_have_bits_of_their_layer(mlx_folder, generator):
    expected = {}

    def quantized(name, weight):
        if name == DENSE:
            return None
        bits, group = (8, 64) if name == EIGHT else (3, 32)
        (n, k), each = weight.shape, weight.shape[1] // group
        codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
        scales, biases = (torch.randn(n, each, generator=generator).bfloat16() for _ in range(2))
        wide = [part.float().repeat_interleave(group, 1) for part in (scales, biases)]
        expected[name] = wide[0] * codes + wide[1]
        return {"weight": words(codes, bits), "scales": scales, "biases": biases}

    settings = {"group_size": 32, "bits": 3, DENSE: False, EIGHT: {"group_size": 64, "bits": 8}}
    checkpoint = mlx_folder(settings, quantized)

    assert set(checkpoint.layers) == set(expected)
    for name, values in expected.items():
        assert torch.equal(checkpoint.layer(name).weight.in_own_order().float(), values), name


@pytest.mark.parametrize(("mode", "group"), [("mxfp4", 32), ("nvfp4", 16)])
def test_four_bit_floats_are_code_times_scale(mlx_folder, generator, mode, group):
    expected = {}

    def quantized(name, weight):
        n, k = weight.shape
        codes = torch.randint(0, 16, (n, k), generator=generator)
        stored = torch.randint(90, 120, (n, k // group), generator=generator).to(torch.uint8)
        kind = torch.float8_e8m0fnu if mode == "mxfp4" else torch.float8_e4m3fn
        numbers = torch.cat([E2M1, -E2M1])[codes]
        expected[name] = numbers * stored.view(kind).float().repeat_interleave(group, 1)
        return {"weight": words(codes, 4), "scales": stored}

    checkpoint = mlx_folder({"group_size": group, "bits": 4, "mode": mode}, quantized)

    for name, values in expected.items():
        assert torch.equal(checkpoint.layer(name).weight.in_own_order().float(), values), name
