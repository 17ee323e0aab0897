"""`flexq-bench accuracy`: a model under schemes, stored, shown, gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexq_bench.accuracy import evaluator as evaluating
from flexq_bench.accuracy.results import AT_POSITIONS, OF_TEXTS
from flexq_bench.exit_codes import ExitCode
from flexq_bench.schemes.scheme import Scheme

DATA = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-llama" / "calibration.txt")


def test_each_scheme_is_evaluated_with_the_original_model(accuracy, stored):
    ran = accuracy("--schemes", "w6a6,w4a4")
    assert ran.code == ExitCode.PASS, ran.error
    perplexities = {r.scheme: r.value for r in stored() if r.metric == "perplexity"}
    assert perplexities["fp16"] < perplexities["w6a6"] < perplexities["w4a4"]
    for value in perplexities.values():
        assert f"{value:.3f}" in ran.out
    assert "128 … 255" in ran.out


def test_record_has_all_parameters_of_its_value(accuracy, stored):
    accuracy("--schemes", "w6a6", "--layers")
    records = {(r.scheme, r.metric): r for r in stored()}
    metrics = {metric for scheme, metric in records if scheme == "w6a6"}
    parts = {"perplexity_from_0", "perplexity_from_128"}
    assert metrics == set(OF_TEXTS) - set(AT_POSITIONS) | parts
    first, second = (records["w6a6", part] for part in sorted(parts))
    assert first.n_items + second.n_items == 1275
    low, high = sorted((first.value, second.value))
    assert low < records["w6a6", "perplexity"].value < high
    assert {r.bos for r in records.values()} == {"none"}
    median, p99, largest = (records["w6a6", f"kl_{name}"] for name in ("median", "p99", "max"))
    assert 0 < median.value < records["w6a6", "kl_divergence"].value < p99.value < largest.value
    assert p99.parameters["observed"]["low"] < p99.value < p99.parameters["observed"]["high"]
    record = records["w6a6", "perplexity"]
    assert record.n_items == 1275
    assert len(record.values) == 5
    assert len(record.model_hash) == len(record.data_hash) == 64
    assert record.parameters["context"] == 256
    assert record.parameters["options"] == {
        "w_bits": 6,
        "a_bits": 6,
        "group": 128,
        "kv_bits": 16,
        "per_token": False,
    }
    assert record.parameters["observed"]["tokens_per_s"] > 0
    assert record.environment["transformers"]
    assert records["w6a6", "layer_error"].n_items == 28


def test_results_are_written_as_json_lines(accuracy):
    ran = accuracy("--schemes", "w6a6", "--json", "-")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert {row["kind"] for row in rows} == {"accuracy"}
    assert "perplexity" in ran.error


def test_change_within_its_interval_is_marked(accuracy):
    ran = accuracy("--schemes", "w8a16[group=128]")
    assert "within noise" in ran.out


def test_resumed_run_evaluates_missing_units_only(accuracy, stored, monkeypatch):
    real, done = Scheme.quantize, []

    def quantize(self, model, *rest, **named):
        if self.name == "w4a4" and "stop" not in done:
            done.append("stop")
            raise KeyboardInterrupt
        done.append(self.name)
        real(self, model, *rest, **named)

    monkeypatch.setattr(evaluating.resolve("w6a6").__class__, "quantize", quantize)
    ran = accuracy("--schemes", "w6a6,w4a4")
    assert ran.code == 130
    run = stored()[0].run.uuid
    assert f"--resume {run[:8]}" in ran.error
    before = {r.uuid: r.created_at for r in stored()}

    again = accuracy("--schemes", "w6a6,w4a4", "--resume", run[:8])
    assert again.code == ExitCode.PASS, again.error
    assert done == ["w6a6", "stop", "w4a4"]
    after = {r.uuid: r.created_at for r in stored()}
    assert before.items() <= after.items()  # not evaluated again
    assert {r.run.uuid for r in stored()} == {run}
    assert {r.scheme for r in stored()} == {"fp16", "w6a6", "w4a4"}


def test_resuming_with_other_options_is_refused(accuracy, stored):
    accuracy("--schemes", "w6a6")
    run = stored()[0].run.uuid
    ran = accuracy("--schemes", "w6a6", "--context", "128", "--resume", run)
    assert ran.code == ExitCode.USAGE
    assert "was evaluated with other options" in ran.error


def test_nonfinite_perplexity_is_stored_as_failed(accuracy, stored, monkeypatch):
    def explode(self, model, *rest, **named):
        model.model.norm.weight.data.fill_(float("nan"))

    monkeypatch.setattr(evaluating.resolve("w6a6").__class__, "quantize", explode)
    ran = accuracy("--schemes", "w6a6")
    assert ran.code == ExitCode.INFRASTRUCTURE
    failed = [r for r in stored() if r.status == "failed"]
    assert [(r.scheme, r.value) for r in failed] == [("w6a6", None)]
    assert "the perplexity is nan" in failed[0].detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schemes", "w66"), "no scheme 'w66': there are w6a6"),
        (("--schemes", "gptq-w4a16"), "calibration data are needed: give --calibration FILE"),
        (("--context", "257"), "tiny-llama has 256 positions, segments of 257 tokens don't fit"),
        (
            ("--schemes", "fp6[gptq=true]", "--calibration", DATA, "--calibration-length", "512"),
            "tiny-llama has 256 positions, segments of 512 tokens",
        ),
        (
            ("--schemes", "gptq-w4a16", "--calibration", DATA, "--data", f"mine={DATA}"),
            "--calibration is a text of --data",
        ),
        (("--data", f"heldout={DATA}"), "texts and tasks are called heldout: write NAME=PATH"),
        (("--dtype", "int8"), "no data type 'int8'"),
        (("--data", "nowhere.txt"), "no text nowhere.txt"),
        (("--device", "cuda:9"), "no device 'cuda:9'"),
        (("--resume", "0000"), "no run begins with '0000'"),
    ],
)
def test_invalid_options_are_refused_in_one_line(accuracy, options, message):
    ran = accuracy(*options)
    assert ran.code == ExitCode.USAGE
    assert message in ran.error
    assert len(ran.error.splitlines()) == 1


def test_call_without_text_or_task_is_refused(accuracy):
    ran = accuracy(data=None)
    assert ran.code == ExitCode.USAGE
    assert "evaluate on what? Give --data FILE, --tasks NAMES, or both" in ran.error


@pytest.mark.slow
def test_resumed_run_repeats_failed_units(accuracy, stored, monkeypatch):
    uniform = evaluating.resolve("w6a6").__class__
    real = uniform.quantize

    def out_of_memory(self, model, *rest, **named):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(uniform, "quantize", out_of_memory)
    ran = accuracy("--schemes", "w6a6")
    assert ran.code == ExitCode.INFRASTRUCTURE
    assert [r.detail for r in stored() if r.status == "failed"] == ["out of memory"]

    monkeypatch.setattr(uniform, "quantize", real)
    run = stored()[0].run.uuid
    assert accuracy("--schemes", "w6a6", "--resume", run).code == ExitCode.PASS
    assert [r.status for r in stored() if (r.scheme, r.metric) == ("w6a6", "perplexity")] == [
        *("failed", "ok"),
    ]
