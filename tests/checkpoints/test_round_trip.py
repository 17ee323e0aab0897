"""Written and read checkpoints are equal, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_layers import same_layer, same_tensor

from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.layers import encode
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.quantizing import quantize_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import DynamicActivation, StaticActivation
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_files import find_model
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
groups = st.sampled_from([None, 1, 7, 32, 128])
bits = st.integers(2, 8)
weight_formats = st.one_of(
    st.builds(NumberFormat, bits, groups, st.sampled_from(["symmetric", "asymmetric"])),
    st.builds(NumberFormat, st.integers(3, 8), groups, st.just("balanced")),
    st.builds(NumberFormat, st.sampled_from([5, 6]), groups, st.just("float")),
    st.just(NumberFormat(8, None, "float")),
    st.builds(
        NumberFormat, st.just(4), st.sampled_from([7, 128]), st.sampled_from(["dual", "mixed"])
    ),
    st.builds(NumberFormat, st.just(6), st.sampled_from([7, 128]), st.just("dual")),
    st.just(NumberFormat(16, kind="dense")),
    st.sampled_from(
        ["mxfp4", "mxfp6-e3m2", "mxfp8-e5m2", "nvfp4", "fp8/128x128", "fp8/tensor", "int8/2x7@bf16"]
    ).map(NumberFormat.parse),
)
clips = st.floats(0.1, 1)
dynamic = st.one_of(
    st.builds(NumberFormat, bits, groups, st.sampled_from(["symmetric", "asymmetric"]), clips),
    st.builds(NumberFormat, st.just(4), st.sampled_from([7, 128]), st.just("mixed"), clips),
    st.just(NumberFormat(8, None, "float")),
)
scales = st.floats(1e-3, 100)
activations = st.one_of(
    st.none(),
    st.builds(DynamicActivation, dynamic),
    st.builds(StaticActivation, st.builds(NumberFormat, bits), scales),
    st.builds(
        StaticActivation, st.just(NumberFormat(8, kind="asymmetric")), scales, st.integers(0, 255)
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    weight_formats, activations, st.integers(1, 40), st.integers(1, 150), st.booleans(), st.data()
)
def test_layers_of_every_format_and_shape(number, activation, rows, k, biased, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    matrix = torch.randn(rows, k, generator=generator)
    bias = torch.randn(rows, generator=generator).half() if biased else None
    layer = QuantizedLayer(quantize(matrix, number), activation, bias)
    scheme = StoredScheme(name="w6a6", version=1)
    extension = Extension(scheme=scheme, kv_bits=16, layers={})

    with tempfile.TemporaryDirectory() as at:
        folder = Path(at) / "checkpoint"
        with CheckpointWriter(folder, {}, extension) as writer:
            writer.add_layer("model.layers.0.some_proj", layer)
            writer.finish()
        again = open_checkpoint(folder).layer("model.layers.0.some_proj")

    assert same_layer(again, layer)


@pytest.mark.parametrize("scale", [0, 5, -1])
def test_group_integer_beyond_six_bits_is_refused(scale):
    operand = quantize(torch.ones(3, 200), NumberFormat(6, 128, "dual"))
    operand.scales[1, 1] = scale

    with pytest.raises(CheckpointError, match="1 to 4"):
        encode(QuantizedLayer(operand, None))


SCHEMES = (
    *("flexq-w6ax", "w4a16", "w8a16", "fp5", "fp6[gptq=true]", "gptq-w3a16", "awq-w4a16"),
    *("smoothquant-w6a6[alpha=none]", "dual-w6a8[search=none]", "omniquant-w4a16[epochs=1]"),
    *("smoothquant-w8a8", "omniquant-w6a6[epochs=1]", "abq-w2*a8[epochs=1]", "atom-w4a4+kv4"),
    *("dgq-w4a8[row_steps=8]", "dgq-w4a8[static=true,search=false]", "flexq-w6ax[a8_budget=0.25]"),
    *("dual-w6a8[row_steps=2]", "quarot-w6a6", "omniquant-w4a8[epochs=1,symmetric=false]"),
    *("duquant-w6a6[steps=4]", "atom-w8a8", "fp8", "fp8-block", "mxfp4-a16", "mxfp6-a8"),
    *("mxfp6[weight_format=mxfp6-e3m2,gptq=true]", "nvfp4", "mxfp8"),
)


@pytest.mark.parametrize("name", SCHEMES)
def test_streamed_model_equals_one_in_memory(name, small_llama, calibration, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    scheme = resolve(name)
    scheme.quantize(model, calibration, seed=5)
    expected = {
        path: module.layer
        for path, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }

    quantize_checkpoint(
        open_source(find_model(str(small_llama))),
        scheme,
        tmp_path / "out",
        calibration=calibration,
        seed=5,
        device=CPU,
        dtype=torch.float32,
    )

    checkpoint = open_checkpoint(tmp_path / "out")
    assert set(checkpoint.layers) == set(expected)
    for path, layer in expected.items():
        assert same_layer(checkpoint.layer(path), layer), path
    state = model.state_dict()
    assert set(checkpoint.tensor_names) == {
        path for path in state if path.rpartition(".")[0] not in expected
    }
    for path in checkpoint.tensor_names:
        assert same_tensor(checkpoint.tensor(path), state[path].half()), path
    assert checkpoint.kv_bits == scheme.kv_bits
    assert (checkpoint.scheme.name, checkpoint.scheme.seed) == (scheme.name, 5)


def test_tensors_beyond_fp16_keep_their_type(write):
    layer = QuantizedLayer(quantize(torch.ones(2, 4), NumberFormat(8)))
    large = torch.tensor([1e6, 1.0])
    written = {"wide": large, "fine": torch.ones(3, dtype=torch.bfloat16)}

    checkpoint = open_checkpoint(write({"model.layers.0.x": layer}, tensors=written))

    assert same_tensor(checkpoint.tensor("wide"), large)
    assert same_tensor(checkpoint.tensor("fine"), torch.ones(3).half())
