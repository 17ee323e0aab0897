"""One name, one meaning: algorithm, formats, kernels and cache."""

from __future__ import annotations

import pytest

from flexq_bench.kernels.formats import FP16, NumberFormat
from flexq_bench.kernels.registry import resolve as resolve_kernel
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.kernel_choice import kernel_label, no_kernel_reason
from flexq_bench.schemes.registry import layer_kernels, named_schemes, resolve, without_cache

INT8 = NumberFormat(8)


@pytest.mark.parametrize(
    ("weight", "activation", "label"),
    [
        (NumberFormat(6, 128), NumberFormat(6, 128), "flexq"),
        (NumberFormat(6, 128), NumberFormat(8, 128), "flexq[w6a8]"),
        (INT8, INT8, "cublaslt-w8a8"),
        (NumberFormat(8, kind="float"), NumberFormat(8, kind="float"), "cublaslt-fp8"),
        (NumberFormat(4, 128, "dual"), INT8, "dgq-w4a8"),
        (NumberFormat(6, 128, "dual"), INT8, "dual-w6a8"),
        (NumberFormat(4, 128), INT8, "group-w4a8"),
        (NumberFormat(4, 128, "mixed", 0.85), NumberFormat(4, 128, "mixed", 0.9), "atom-w4a4"),
        (NumberFormat(3), NumberFormat(5), "abq-w3a5"),
        (NumberFormat(3, kind="balanced"), INT8, "abq-w3a8"),
        (NumberFormat(4, kind="balanced"), NumberFormat(4), "abq-w4a4"),
        (INT8, FP16, "w8a16"),
        (NumberFormat(4, 128), FP16, "w4a16"),
        (NumberFormat(6, 128), FP16, "w6a16"),
        (NumberFormat(4, 128, "asymmetric"), FP16, "w4a16[zeros]"),
        (NumberFormat(6, kind="float"), FP16, "fp6-w6a16"),
        (NumberFormat(5, 128, "float"), FP16, "fp5-w5a16[fine]"),
        (FP16, FP16, "fp16"),
    ],
)
def test_formats_choose_the_kernel(weight, activation, label):
    assert kernel_label(weight, activation) == label
    assert no_kernel_reason(weight, activation) == ""


@pytest.mark.parametrize(
    ("weight", "activation", "words"),
    [
        (INT8, None, "one scale of all tokens"),
        (NumberFormat(7, 64), INT8, "no kernel reads int7/64 weights"),
        (NumberFormat(6, 32), FP16, "no kernel reads int6/32 weights"),
        (NumberFormat(8), NumberFormat(8, clip=0.5), "all of their range, not to 0.5"),
    ],
)
def test_formats_without_a_kernel_say_why(weight, activation, words):
    assert kernel_label(weight, activation) is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(no_kernel_reason(weight, activation))


def test_kernel_of_a_scheme_has_its_formats_on_both_backends():
    for named in named_schemes():
        for row in (*named.gated, *named.plain):
            assert bool(row.kernel) != bool(row.reason)
            if row.kernel:
                for backend in ("cuda", "cpu"):
                    spec = resolve_kernel(row.kernel, backend).spec
                    assert spec.weight.bits == row.formats.weight.bits
                    assert spec.activation == row.formats.activation


@pytest.mark.parametrize(
    ("name", "kernel"), [("w8a16", "w8a16"), ("w8a16[group=128]", "w8a16[groups]")]
)
def test_w8a16_has_a_kernel_for_rows_and_groups(name, kernel):
    assert {row.kernel for row in layer_kernels(resolve(name), gated=True)} == {kernel}


def test_grouped_weights_with_per_token_activations(tiny_llama):
    model = tiny_llama()
    scheme = resolve("w4a8[group=32,per_token=true]")
    scheme.quantize(model)

    layer = model.model.layers[0].self_attn.q_proj.layer
    assert (layer.weight_format.name, layer.activation_format.name) == ("int4/32", "int8/row")
    formats = scheme.layer_formats("q_proj", gated=True)
    assert (formats.weight, formats.activation) == (layer.weight_format, layer.activation_format)


@pytest.mark.parametrize(
    ("name", "bits", "base"),
    [
        ("flexq-w6ax", 16, "flexq-w6ax"),
        ("flexq-w6ax+kv8", 8, "flexq-w6ax"),
        ("flexq-w6ax[a8=q_proj+k_proj]+kv4", 4, "flexq-w6ax[a8=q_proj+k_proj]"),
        ("w6a6[kv_bits=8]", 8, "w6a6[kv_bits=8]"),
        ("atom-w4a4", 4, "atom-w4a4"),
        ("atom-w4a4+kv16", 16, "atom-w4a4"),
        ("atom-w4a4[kv_bits=16]", 16, "atom-w4a4[kv_bits=16]"),
    ],
)
def test_name_determines_the_cache(name, bits, base):
    scheme = resolve(name)

    assert (scheme.kv_bits, scheme.name, without_cache(name)) == (bits, name, base)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w6a5x", "no scheme 'w6a5x': there are w6a8, w6a6"),
        ("w9a9", "no scheme 'w9a9'"),
        ("flexq", "no scheme 'flexq': there are flexq-w6a"),
        ("fp6-w6a16", "it is named fp6"),
        ("fp5-w5a16+kv8", "it is named fp5"),
        ("flexq-w6a8", "it is named w6a8"),
        ("w6a6+kv3", "16, 8 or 4 bits, got 3: write w6a6.kv8"),
        ("w6a6[kv_bits=5]", "16, 8 or 4 bits, got 5"),
        ("w6a6[grup=3]", "no option of .* named 'grup': there are group"),
        ("w6a6[group]", "needs a value"),
        ("w6a6[group=many]", "can't be 'many'"),
        ("abq-w6a6[epochs=-1]", "takes 0 epochs or more and rates above 0, got -1"),
        ("abq-w6a6[compensated_blocks=-1]", "0 blocks or more"),
        ("omniquant-w6a6[clip_rate=0]", r"rates above 0, got 20, 0\.005 and 0\.0"),
        ("omniquant-w6a6[clip_rate=inf]", "rates above 0"),
        ("omniquant-w6a6[alpha=2]", "alpha is a share"),
        ("smoothquant-w6a6[alpha=2]", "alpha is a share"),
        ("smoothquant-w6a6[samples=0]", "at least 1 token"),
        ("gptq-w4a16[damping=0]", "damping must be above 0"),
        ("gptq-w4a16[damping=inf]", "damping must be above 0"),
        ("dgq-w4a8[outliers=1]", "outliers is a share"),
        ("dgq-w4a8[group=0]", "a group needs at least one value"),
        ("dual-w6a8[search=no]", "search is one of"),
        ("atom-w4a4[group=none]", "gptq=false"),
        ("atom-w4a4[weight_clip=0]", "clip is a share"),
        ("awq-w4a16[steps=0]", "at least 1 step"),
        ("awq-w4a16[clip_steps=-1]", "clipping 0 or more"),
        ("duquant-w4a4[steps=0]", "steps is at least 1"),
        ("quarot-w4a4[activation_clip=1.5]", "clip is a share"),
        ("flexq-w6ax[a8_budget=1.5]", "0 to 1"),
        ("flexq-w6ax[a8_budget=0.5,a8=fc2]", "give one"),
        ("flexq-w6ax[a8_budget=0.5,a8_cost=money]", "no cost named 'money'"),
    ],
)
def test_unknown_names_and_invalid_options_are_refused_in_one_line(name, words):
    with pytest.raises(QuantizeError, match=words) as refused:
        resolve(name)

    assert "\n" not in str(refused.value)
