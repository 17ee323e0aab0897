"""`accuracy` of a quantized checkpoint, through the reference and through kernels."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from flexq_bench.accuracy.requantization import rounded_as_stored
from flexq_bench.accuracy.results import AT_POSITIONS, LAYER_ERROR, OF_TEXTS
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import StaticActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer


def test_checkpoint_equals_its_scheme_in_memory(accuracy, stored, checkpoint, tiny_llama):
    ran = accuracy(model=checkpoint)
    assert ran.code == ExitCode.PASS, ran.error
    accuracy("--schemes", "flexq-w6ax", model=tiny_llama)
    of_folder, in_memory = (
        r for r in stored() if (r.metric, r.scheme) == ("perplexity", "flexq-w6ax")
    )
    # Norms and embeddings are stored in FP16, in memory they are FP32.
    assert of_folder.value == pytest.approx(in_memory.value, rel=1e-4)
    assert of_folder.model == in_memory.model == "tiny-llama"
    assert of_folder.content_hash == open_checkpoint(checkpoint).content_hash
    assert (of_folder.through, of_folder.scheme_version) == ("reference", in_memory.scheme_version)


def test_checkpoint_is_compared_with_the_given_original(accuracy, stored, checkpoint, tiny_llama):
    ran = accuracy("--checkpoint", str(checkpoint), model=tiny_llama)
    assert ran.code == ExitCode.PASS, ran.error
    records = {(r.scheme, r.metric): r for r in stored()}
    of_both = {"perplexity", "perplexity_from_0", "perplexity_from_128"}
    compared = set(OF_TEXTS) - set(AT_POSITIONS) - {LAYER_ERROR}
    assert set(records) == {
        *(("fp16", metric) for metric in of_both),
        *(("flexq-w6ax", metric) for metric in of_both | compared),
    }
    assert records["fp16", "perplexity"].content_hash is None
    hashes = {r.content_hash for (scheme, _), r in records.items() if scheme != "fp16"}
    assert hashes == {open_checkpoint(checkpoint).content_hash}


def fewer_positions(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))


def fewer_merges(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    del tokenizer["model"]["merges"][50:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer_positions, "changed has 64 positions, segments of 128 tokens don't fit"),
        (fewer_merges, "its tokenizer reads the text as other tokens than that of tiny-llama"),
    ],
)
def test_checkpoint_with_other_tokenization_is_refused(cli, tiny_llama, tmp_path, change, message):
    changed, out = tmp_path / "changed", tmp_path / "out"
    shutil.copytree(tiny_llama, changed)
    change(changed)
    ran = cli("quantize", str(changed), "--scheme", "w8a16", "--out", str(out), "--device", "cpu")
    assert ran.code == ExitCode.PASS, ran.error

    ran = cli(
        *("accuracy", "--model", str(tiny_llama), "--checkpoint", str(out), "--device", "cpu"),
        *("--data", str(tiny_llama / "heldout.txt"), "--context", "128", "--max-tokens", "127"),
    )

    assert ran.code == ExitCode.USAGE
    assert message in ran.error


def test_kernels_agree_with_the_reference(accuracy, stored, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "w8a16", "w8a16")
    accuracy("--through", "kernels", "--max-tokens", "255", model=folder)
    accuracy("--through", "reference", "--max-tokens", "255", model=folder)
    of = {r.through: r for r in stored()}
    assert of["kernels"].value == pytest.approx(of["reference"].value, rel=1e-3)
    assert of["kernels"].value != of["reference"].value
    # Kernels compute as decode does, in FP16; the reference has the dtype that it was loaded in.
    dtypes = {through: record.parameters["dtype"] for through, record in of.items()}
    assert dtypes == {"kernels": "float16", "reference": "float32"}


@pytest.mark.slow
def test_run_is_not_resumed_through_another_implementation(accuracy, stored, checkpoint):
    accuracy(model=checkpoint)
    ran = accuracy("--through", "kernels", "--resume", stored()[0].run.uuid, model=checkpoint)
    assert ran.code == ExitCode.USAGE
    assert "was evaluated with other options" in ran.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schemes", "w6a6"), "is quantized already: leave --schemes out"),
        (("--through", "magic"), "--through magic: give reference or kernels"),
        (("--layers",), "--layers compares with what was folded into the model"),
        (("--checkpoint", "x"), "is a quantized checkpoint itself"),
    ],
)
def test_options_contradicting_a_checkpoint_are_refused(accuracy, checkpoint, options, message):
    ran = accuracy(*options, model=checkpoint)
    assert ran.code == ExitCode.USAGE
    assert message in ran.error
    assert len(ran.error.splitlines()) == 1


def test_scheme_without_kernels_is_refused_before_evaluation(accuracy, stored, tiny_llama):
    ran = accuracy("--schemes", "w6a6,w5a6", "--through", "kernels", model=tiny_llama)
    assert ran.code == ExitCode.USAGE
    assert "w5a6: q_proj: no kernel reads int5/128 weights: evaluate --through ref" in ran.error
    assert stored() == []


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_bound_of_another_tool_has_activation_scales_that_fit(a_model, scale):
    original, name = a_model(layers=1), "model.layers.0.mlp.up_proj"
    dense, eight = original.get_submodule(name), NumberFormat(8)
    stored = QuantizedLayer(quantize(dense.weight, eight), StaticActivation(eight, scale), None)
    checkpoint = SimpleNamespace(
        layers=[name],
        layer=lambda name, device: stored,
        kv_bits=16,
        fp8_cache_scales_of_blocks=lambda: None,
    )
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    made = rounded_as_stored(checkpoint, {}, original).get_submodule(name)(x)
    assert (made - dense(x)).norm() < 0.02 * dense(x).norm()
