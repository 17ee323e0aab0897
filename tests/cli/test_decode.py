"""`flexq-bench decode` on a CPU: a tiny model from disk, end to end with the reference kernels."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.cli import decoding
from flexq_bench.cli.app import main
from flexq_bench.db.exchange import read_records
from flexq_bench.db.records import DecodeRecord
from flexq_bench.decode import measurement as measuring
from flexq_bench.decode.report import decode_table, explain, explanation_table, explanations


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, llama_config: Callable) -> Path:
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = llama_config(64, 128, 96, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def quantized_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are quantized in this process: one of their own takes seconds to start."""

    def quantize(name: str, options: Sequence[str]) -> float:
        assert main(["quantize", name, *options]) == 0
        return 0.0

    monkeypatch.setattr(decoding, "_quantize", quantize)


@pytest.mark.usefixtures("quantized_here")
def test_model_is_decoded_under_each_scheme(
    cli: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "decode.jsonl"
    options = ("--scheme", "fp16,w8a16", "--batch", "1,2", "--new", "4", "--backend", "cpu")
    options += ("--processes", "1")

    ran = cli("decode", str(model), *options, "--json", str(out))

    assert ran.code == 0, ran.err
    records = list(read_records(out))
    assert [(r.scheme, r.batch) for r in records] == [
        ("fp16", 1),
        ("fp16", 2),
        ("w8a16", 1),
        ("w8a16", 2),
    ]
    assert all(r.status == "ok" and r.token_ms and r.weights == str(model) for r in records)
    assert records[2].kernels["qkv_proj"] == "w8a16"
    assert records[2].weights_bytes < records[0].weights_bytes
    copy = tmp_path / "copy.jsonl"
    assert cli("db", "export", str(copy)).code == 0
    assert [json.loads(line)["uuid"] for line in copy.read_text().splitlines()] == [
        r.uuid for r in records
    ]


@pytest.mark.slow
def test_cached_checkpoint_is_decoded_again(
    cli: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    options = ("--new", "2", "--backend", "cpu", "--processes", "1")
    first, second, third = (tmp_path / f"{name}.jsonl" for name in ("first", "second", "third"))

    made = cli("decode", str(model), "--scheme", "w8a16+kv8", *options, "--json", str(first))
    again = cli("decode", str(model), "--scheme", "w8a16", *options, "--json", str(second))
    (folder,) = (path for path in (tmp_path / "cache" / "checkpoints").iterdir() if path.is_dir())
    alone = cli("decode", str(folder), "--kv-bits", "4", *options, "--json", str(third))

    assert (made.code, again.code, alone.code) == (0, 0, 0), made.err + again.err + alone.err
    assert "w8a16: quantized in" in made.err
    assert "kept in" in made.err
    assert "quantized in" not in again.err
    assert f"found in {folder}" in again.err
    records = [record for file in (first, second, third) for record in read_records(file)]
    assert [(r.scheme, r.kv_bits) for r in records] == [("w8a16", bits) for bits in (8, 16, 4)]
    # The cache decides numbers: a hash is of what is served, not of the folder alone.
    checkpoint = open_checkpoint(folder)
    expected = [checkpoint.hash_with_cache(bits) for bits in (8, 16, 4)]
    assert [r.content_hash for r in records] == expected
    assert len(set(expected)) == 3
    assert expected[1] == checkpoint.content_hash
    assert checkpoint.content_hash[:12] in made.err
    assert {(r.scheme_version, r.kernels["qkv_proj"]) for r in records} == {(2, "w8a16")}
    assert [r.model for r in records[:2]] == ["tiny-llama"] * 2


def test_undecodable_schemes_are_refused_before_quantizing(
    cli: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    for scheme, words in (
        ("fp16,w5a16", "qkv_proj under w5a16 is int5/128 x fp16: no kernel reads"),
        ("smoothquant-w8a8", "calibration data are needed: give --calibration FILE"),
        ("flexq-w6ax[a8=q_proj]", "decode runs them as one layer; pick another scheme"),
        ("fp6-w6a16", "no scheme 'fp6-w6a16': it is named fp6"),
    ):
        ran = cli("decode", str(model), "--scheme", scheme, "--backend", "cpu")
        assert (ran.code, words in ran.error) == (2, True), ran.err
    random = cli("decode", "llama-7b", "--scheme", "fp16,w5a16", "--backend", "cpu")
    assert (random.code, "qkv_proj under w5a16 is int5/128 x fp16" in random.error) == (2, True)
    assert not (tmp_path / "cache" / "checkpoints").exists()


@pytest.mark.slow
def test_quantization_error_is_printed_once(
    cli: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    broken = shutil.copytree(model, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_act": "nonsense"}))

    ran = cli("decode", str(broken), "--scheme", "w8a16", "--new", "2", "--backend", "cpu")

    assert ran.code == 2
    assert ran.error.count("flexq-bench:") <= 1


@pytest.mark.slow
def test_interrupted_decode_resumes(
    cli: Callable, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "decode.jsonl"
    options = ("--scheme", "fp16", "--batch", "1,2", "--new", "3", "--backend", "cpu")
    command = ("decode", str(model), *options, "--json", str(out))
    monkeypatch.setattr("sys.argv", ["flexq-bench", *command])
    measure = measuring.decode_all

    def stopped(*given: Any) -> Iterator[DecodeRecord]:
        records = measure(*given)
        yield next(records)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "decode_all", stopped)
    broken_off = cli(*command)
    monkeypatch.setattr(measuring, "decode_all", measure)

    assert broken_off.code == 130
    last = broken_off.err.splitlines()[-1]
    assert last.startswith("interrupted: what was measured is stored, continue with ")
    assert [len(record.processes) for record in read_records(out)] == [1]
    again = shlex.split(last.partition(" continue with ")[2])
    resume = again[again.index("--resume") :]

    other = cli(*(part.replace("1,2", "1") for part in command), *resume)
    assert (other.code, "was begun with other options" in other.error) == (2, True)
    gone_on = cli(*command, *resume)

    assert gone_on.code == 0, gone_on.err
    assert [len(record.processes) for record in read_records(out)] == [1, 1]
    assert len({record.run.uuid for record in read_records(out)}) == 1


def test_parquet_file_for_decode_is_refused(cli: Callable, tmp_path: Path) -> None:
    ran = cli("decode", "llama-7b", "--json", str(tmp_path / "decode.parquet"))

    assert (ran.code, "the name must end in .jsonl" in ran.error) == (2, True)


@pytest.mark.slow
def test_requests_are_served(cli: Callable, model: Path, tmp_path: Path) -> None:
    out, lengths = tmp_path / "serve.jsonl", tmp_path / "lengths.csv"
    lengths.write_text("5,6\n9,2\n3,4\n")
    options = ("--scheme", "fp16", "--serve", "--batch-limit", "2", "--lengths", str(lengths))

    ran = cli("decode", str(model), *options, "--backend", "cpu", "--json", str(out))

    assert ran.code == 0, ran.err
    (record,) = read_records(out)
    assert (record.requests, record.new_tokens, record.parameters["slots"]) == (3, 12, 2)
    assert record.tokens_per_s > 0
    assert 0 < record.ttft_p50_ms <= 1000 * record.latency_p50_s


def test_invalid_decode_requests_are_usage_errors(
    cli: Callable, model: Path, tmp_path: Path
) -> None:
    unknown = cli("decode", str(model), "--scheme", "fp17")
    assert (unknown.code, "no scheme 'fp17'" in unknown.error) == (2, True)

    odd = cli("decode", str(model), "--scheme", "fp16,w8a16+kv5")
    assert (odd.code, "16, 8 or 4 bits, got 5: write w8a16+kv8" in odd.error) == (2, True)

    too_long = cli("decode", str(model), "--scheme", "fp16", "--new", "999", "--backend", "cpu")
    assert (too_long.code, "context of 256 tokens" in too_long.error) == (2, True)

    # With a scheme that would be quantized first, which takes minutes for a large model.
    lengths = ("--serve", "--lengths", str(tmp_path / "missing.csv"))
    missing = cli("decode", str(model), "--scheme", "flexq-w6ax", *lengths, "--backend", "cpu")
    assert (missing.code, "missing.csv" in missing.error) == (2, True)
    many = cli("decode", str(model), "--serve", "--requests", "0x", "--backend", "cpu")
    assert (many.code, "--requests is 1 to" in many.error) == (2, True)
    assert "quantized" not in missing.err


def record(token_ms: float, parts: dict[str, float], **given: object) -> DecodeRecord:
    listed = tuple({"part": name, "count": 1, "us": us} for name, us in parts.items())
    empty = dict.fromkeys(DecodeRecord.__dataclass_fields__)
    return DecodeRecord(**{**empty, "token_ms": token_ms, "parts": listed, **given})


def test_parts_explain_speedup_of_model() -> None:
    base = record(6.0, {"norm": 1000.0, "qkv_proj": 5000.0})
    explained = explain(base, record(3.1, {"norm": 1000.0, "qkv_proj": 2000.0}))

    assert explained is not None
    assert explained.explained == pytest.approx(2.0)
    assert explained.measured == pytest.approx(6.0 / 3.1)
    by_part = {change.part: change for change in explained.changes}
    assert by_part["qkv_proj"].speedup == pytest.approx(2.5)
    # Amdahl: what a part saves is its share times (1 - 1 / its speed-up).
    assert by_part["qkv_proj"].saved == pytest.approx(5 / 6 * (1 - 1 / 2.5))


def test_scheme_is_compared_with_base_of_same_cache_bits() -> None:
    parts = {"attention": 1000.0}
    fp16, fp16_kv8, kv8, kv4 = (
        record(token_ms, parts, scheme=scheme, kv_bits=bits, status="ok")
        for token_ms, scheme, bits in (
            (8.0, "fp16", 16),
            (7.0, "fp16", 8),
            (3.5, "flexq-w6ax", 8),
            (3.2, "flexq-w6ax", 4),
        )
    )

    explained = {e.head.kv_bits: e for e in explanations([fp16, fp16_kv8, kv8, kv4])}

    assert (explained[8].base, explained[8].measured) == (fp16_kv8, 2.0)
    assert (explained[4].base, explained[4].measured) == (fp16, 2.5)
    titles = [explanation_table(explained[bits]).title for bits in (8, 4)]
    assert [" with a cache of 4 bits," in title for title in titles] == [False, True]
    (ratios,) = (
        list(column.cells) for column in decode_table([fp16, kv8]).columns if column.header == "×"
    )
    assert ratios == ["1.00", "2.29"]
