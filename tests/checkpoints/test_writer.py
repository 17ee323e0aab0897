"""A folder appears whole, or not at all."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from flexq_bench.checkpoints.config import Extension, StoredScheme
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.checkpoints.writer import CheckpointWriter
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer

NAME = "model.layers.0.x"
EXTENSION = Extension(scheme=StoredScheme(name="w6a6", version=1), kv_bits=16, layers={})


def a_layer():
    return QuantizedLayer(quantize(torch.ones(4, 32), NumberFormat(6)))


def test_interrupted_writer_leaves_no_files(write, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointWriter, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        write({NAME: a_layer()}, shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_process_are_removed(write, tmp_path):
    killed = os.fork()
    if killed == 0:
        writer = CheckpointWriter(tmp_path / "checkpoint", {}, EXTENSION)
        writer.add_layer(NAME, a_layer())
        writer.close_shard()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    (left,) = tmp_path.iterdir()
    assert [path.name for path in left.iterdir()] == ["0.safetensors"]

    with CheckpointWriter(tmp_path / "checkpoint", {}, EXTENSION):
        written = {path.name for path in tmp_path.iterdir()}
        os.rename(tmp_path / min(written), tmp_path / ".checkpoint.partial-1")  # another process'
        folder = write({NAME: a_layer()})

        assert left.name not in written
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, ".checkpoint.partial-1"}


def test_folder_with_other_files_is_kept(write, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "thesis.tex").write_text("years")

    with pytest.raises(CheckpointError, match="holds other files"):
        write({NAME: a_layer()}, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint", "thesis.tex"]


def test_checkpoint_is_replaced_only_with_overwrite(write, tmp_path):
    folder = write({NAME: a_layer()})
    with pytest.raises(CheckpointError, match="--overwrite"):
        write({NAME: a_layer()})

    write({"model.layers.0.y": a_layer()}, overwrite=True)

    assert open_checkpoint(folder).layers == ("model.layers.0.y",)
    assert list(tmp_path.iterdir()) == [folder]


def test_file_or_dangling_link_is_refused(write, tmp_path):
    place = tmp_path / "checkpoint"
    place.write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write({NAME: a_layer()})
    place.unlink()
    place.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="is a link to nothing"):
        write({NAME: a_layer()})


def test_unwritable_place_is_refused(write, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't write"):
        write({NAME: a_layer()}, at="file/checkpoint")


def test_checkpoint_without_layers_is_refused(write, tmp_path):
    with pytest.raises(CheckpointError, match="no quantized layer"):
        write({})
    assert list(tmp_path.iterdir()) == []


def test_shards_are_closed_at_a_size(write):
    layers = {f"model.layers.{index}.x": a_layer() for index in range(4)}
    size = 4 * 32 * 6 // 8 + 4 * 2 + 2 * 8

    folder = write(layers, shard_bytes=2 * size)

    assert len(list(folder.glob("*.safetensors"))) == 3  # the norm comes after two of two each
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~_umask()}


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


CODES = torch.zeros(2, 4, dtype=torch.int8)
ONES = torch.ones(2, 1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (Operand(CODES + 8, ONES, 4, None), "codes"),
        (Operand(CODES, ONES * torch.inf, 4, None), "NaN or infinity"),
        (Operand(CODES, ONES, 4, None, ONES.to(torch.int8)), "zero points"),
        (Operand(CODES, ONES, 9, None), "2 to 8 bits"),
        (Operand(CODES.half() + 0.3, ONES, 6, None), "numbers that the format lacks"),
        (Operand(CODES, ONES * 0.5, 4, 4, CODES[:, :1], ONES), "integers"),
    ],
)
def test_codes_outside_their_format_are_refused(write, operand, message):
    with pytest.raises(CheckpointError, match=message):
        write({NAME: QuantizedLayer(operand)})


def test_nonfinite_tensors_are_refused(write):
    with pytest.raises(CheckpointError, match="NaN"):
        write({NAME: a_layer()}, tensors={"model.norm.weight": torch.tensor([torch.nan])})


def test_infinite_bound_of_a_clamp_is_stored(write, tmp_path):
    bound = torch.tensor(-torch.inf)

    write({NAME: a_layer()}, tensors={"tower.input_min": bound})

    assert torch.equal(open_checkpoint(tmp_path / "checkpoint").tensor("tower.input_min"), bound)


def test_static_scale_below_fp16_is_refused(write):
    from flexq_bench.schemes.activations import StaticActivation

    tiny = StaticActivation(NumberFormat(8), 1e-12)
    with pytest.raises(CheckpointError, match="input_scale"):
        write({NAME: QuantizedLayer(a_layer().weight, tiny)})


def test_duplicate_name_is_refused(tmp_path):
    layer = QuantizedLayer(a_layer().weight, DynamicActivation(NumberFormat(8)))
    with CheckpointWriter(tmp_path / "out", {}, EXTENSION) as writer:
        writer.add_layer(NAME, layer)
        with pytest.raises(CheckpointError, match="twice"):
            writer.add_layer(NAME, layer)
