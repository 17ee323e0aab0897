"""Checkpoints that decode quantized before: which are the same, and which make room."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.decode import checkpoint_cache
from flexq_bench.decode.checkpoint_cache import CalibrationText, CheckpointCache, key_of
from flexq_bench.schemes.model_files import ModelFiles
from flexq_bench.schemes.registry import resolve


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    return ModelFiles("model", folder, None, (weights,))


def test_key_covers_all_that_affects_the_bytes(files, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b")
    calibration = CalibrationText(f"text:{text}", 8, None)
    usual = (files, resolve("smoothquant-w8a8"), 0, calibration, "cpu")

    def key(**changes):
        names = ("files", "scheme", "seed", "calibration", "backend")
        return key_of(*({**dict(zip(names, usual, strict=True)), **changes}.values()))

    first = key()
    assert key() == first
    others = [
        key(seed=1),
        key(backend="cuda"),
        key(scheme=resolve("smoothquant-w8a8[alpha=0.6]")),
        key(calibration=replace(calibration, segments=9)),
    ]
    text.write_text("a c")
    others.append(key())
    os.utime(files.weights[0], ns=(1, 1))
    others.append(key())
    assert len({first, *others}) == 7
    # What a scheme doesn't look at has no part in it.
    nearest = resolve("w8a16")
    assert key(scheme=nearest) == key(scheme=nearest, calibration=None)


def test_cached_checkpoint_is_reused_and_the_oldest_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_cache, "_is_complete", lambda path: path.is_dir())
    cache = CheckpointCache(tmp_path / "kept", max_bytes=250)
    made: list[str] = []

    def make(folder):
        made.append(folder.name)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 100)

    for number, key in enumerate(("a", "b", "a", "c")):
        path, was_there = cache.get(key, make)
        assert (path.name, was_there) == (key, number == 2)
        os.utime(path, ns=(number + 1, number + 1))

    assert made == ["a", "b", "c"]
    assert sorted(path.name for path in cache.folder.iterdir() if path.is_dir()) == ["a", "c"]


def test_damaged_checkpoint_is_written_again(tmp_path):
    cache = CheckpointCache(tmp_path / "kept")
    folder = cache.folder / "a"
    folder.mkdir(parents=True)
    described = {"quantization_config": {"flexq_bench": {"version": 1}}}
    (folder / "config.json").write_text(json.dumps(described))
    made: list[Path] = []

    def make(path):
        path.mkdir()  # nothing of the damaged one is left
        made.append(path)

    _, was_there = cache.get("a", make)

    assert (made, was_there) == ([folder], False)
