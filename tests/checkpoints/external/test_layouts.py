"""Folders that other tools wrote (layouts/make_layouts.py): our weights are theirs, bit for bit."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.model_source import open_source
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.streaming import without_weights
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import model_at

LAYOUTS = sorted((Path(__file__).parent / "layouts").glob("*.tar.xz"))
REFUSED = {
    "hqq-4bit": "zero points that are no integers",
    "quanto-qint4": "qint8, qfloat8",
}
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
def test_layout_without_integer_zero_points_is_refused(layout, reason, tmp_path):
    unpacked(Path(__file__).parent / "layouts" / f"{layout}.tar.xz", tmp_path)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)
