"""Folders that other tools wrote (layouts/make_layouts.py): our weights are theirs, bit for bit."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.streaming import without_weights
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import model_at

LAYOUTS = sorted((Path(__file__).parent / "layouts").glob("*.tar.xz"))
REFUSED = {"hqq-4bit": "pickled"}
FOLDERS = [path for path in LAYOUTS if "gguf" not in path.name and path.name[:-7] not in REFUSED]
CPU = torch.device("cpu")
GGUF = [path for path in LAYOUTS if "gguf" in path.name]


def name_of(path):
    return path.name.removesuffix(".tar.xz")


def unpacked(path, folder):
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return json.loads((folder / "expected.json").read_text())


def digest(values, dtype):
    """SHA-256 of a matrix in the tool's dtype, without negative zeros, as in make_layouts."""
    plain = (values + 0.0).to(getattr(torch, dtype)).contiguous()
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def test_at_least_25_layouts_are_there():
    assert len(LAYOUTS) >= 25


@pytest.mark.parametrize("path", FOLDERS, ids=name_of)
def test_weights_equal_those_of_the_tool(path, tmp_path):
    expected = unpacked(path, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.layers) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        values = checkpoint.layer(name).weight.in_own_order()
        assert digest(values, weight["dtype"]) == weight["sha256"], name


@pytest.mark.parametrize("path", GGUF, ids=name_of)
def test_gguf_weights_equal_those_of_its_package(path, tmp_path):
    expected = unpacked(path, tmp_path)["weights"]
    source = open_source(model_at(tmp_path / "model.gguf"))
    model = without_weights(source)
    source.bind(model, linear_origins(model))
    stored = source.read([f"{name}.weight" for name in expected], CPU)
    for full, values in stored:
        weight = expected[full.removesuffix(".weight")]
        assert digest(values, weight["dtype"]) == weight["sha256"], full


@pytest.mark.parametrize(("layout", "reason"), REFUSED.items())
def test_layout_that_may_run_code_is_refused(layout, reason, tmp_path):
    unpacked(Path(__file__).parent / "layouts" / f"{layout}.tar.xz", tmp_path)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


def test_hqq_weights_equal_those_of_the_tool(tmp_path):
    """The tool's pickled tensors, stored as transformers stores them."""
    expected = unpacked(Path(__file__).parent / "layouts" / "hqq-4bit.tar.xz", tmp_path)
    allowed = [torch.Size, torch.nn.parameter.Parameter]
    with torch.serialization.safe_globals(allowed):
        parts = torch.load(tmp_path / "qmodel.pt", map_location="cpu", weights_only=True)
    tensors = {
        f"{module}.{name}": encoded(value)
        for module, values in parts.items()
        for name, value in values.items()
        if value is not None
    }
    (tmp_path / "qmodel.pt").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))

    checkpoint = open_checkpoint(tmp_path)

    assert set(checkpoint.layers) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        values = checkpoint.layer(name).weight.in_own_order()
        assert digest(values, weight["dtype"]) == weight["sha256"], name


def test_fbgemm_layers_have_scales_of_rows_and_bounded_activations(a_folder):
    """The layout of Llama-3.1-405B-FP8: row maxima of activations are at most the bound."""
    layer, bound = "model.layers.0.self_attn.q_proj", 8.0

    def quantized(name, weight):
        scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
        parts = {"weight": (weight / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}
        codes[name] = parts["weight"].float() * scale.float()
        return parts | ({"input_scale_ub": torch.tensor([bound])} if name == layer else {})

    codes = {}
    section = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    checkpoint = open_checkpoint(a_folder(section, quantized))

    assert set(checkpoint.layers) == set(codes)
    for name, values in codes.items():
        assert torch.equal(checkpoint.layer(name).weight.in_own_order().float(), values), name
    x = torch.tensor([[1.0, -9.0, 3.3, 40.0], [0.01, 0.5, -0.3, 0.2]])
    largest = x.abs().amax(1, keepdim=True).clamp(max=bound)
    scale = (largest / 448).half().float()
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(checkpoint.layer(layer).activation(x), rounded)
    assert checkpoint.layer("model.layers.1.mlp.up_proj").activation.bound == 1200


def encoded(value):
    """A tensor of a setting, in HQQ's types."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous()
    if isinstance(value, bool):
        return torch.tensor(int(value), dtype=torch.uint8)
    if isinstance(value, int | tuple):
        return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.int64)
    return torch.tensor([ord(letter) for letter in str(value)], dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_bitnet_layer_equals_that_of_transformers(a_folder, linear_class):
    bitnet = pytest.importorskip("transformers.integrations.bitnet")

    def quantized(_, weight):
        return {
            "weight": bitnet.pack_weights((weight.float() * 60).round().clamp(-1, 1)),
            "weight_scale": torch.tensor([1.25 if linear_class == "bitlinear" else 0.75]),
        }

    section = {"quant_method": "bitnet", "linear_class": linear_class}
    checkpoint = open_checkpoint(a_folder(section, quantized))
    name = "model.layers.1.mlp.up_proj"
    layer, stored = checkpoint.layer(name), load_file(checkpoint.folder / "model.safetensors")
    packed, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    x = torch.randn(5, layer.weight.k, generator=torch.Generator().manual_seed(0)).half().float()
    size = {"in_features": layer.weight.k, "out_features": layer.weight.rows, "bias": False}
    with torch.compiler.set_stance("force_eager"):
        if linear_class == "bitlinear":
            theirs = bitnet.BitLinear(**size, dtype=torch.float32)
            theirs.weight = packed
        else:
            theirs = bitnet.AutoBitLinear(**size, dtype=torch.float32)
            theirs.weight = torch.nn.Parameter(bitnet.unpack_weights(packed, torch.float32))
        theirs.weight_scale = scale
        expected = theirs(x)

    ours = layer.activation(x) @ layer.weight.dequantize(torch.float32).T

    # Their scales of tokens are FP32, ours FP16: a few codes differ by one.
    assert torch.allclose(ours, expected, rtol=0, atol=5e-3 * float(ours.abs().max()))
