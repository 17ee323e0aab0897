"""Write a quantized checkpoint: one shard in memory at a time, into a folder that appears whole."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch

from flexq_bench.checkpoints.config import (
    QUANTIZATION,
    SECTION,
    Extension,
    LayerEntry,
    dumped_section,
)
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.folders import INDEX, WHOLE, is_own_checkpoint
from flexq_bench.checkpoints.hashing import content_hash, vocabulary_digests
from flexq_bench.checkpoints.layers import all_finite, encode, is_finite_or_bound
from flexq_bench.checkpoints.safetensors_io import TensorInfo, write_tensors
from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.quantized_layer import QuantizedLayer

SHARD_BYTES = 1 << 30


class CheckpointWriter:
    """Writes layers and tensors to shards next to the folder; `finish` moves them into it.

    Leaving the `with` block without `finish` removes the written files. Those of a killed process
    are removed by the next writer of the folder. layer_bytes: of the tensors of added layers.

      folder:      must not exist, or be empty; with overwrite it may be a quantized checkpoint.
      hf_config:   Hugging Face's configuration of the model.
      extension:   of the new checkpoint; layers, files and content hash are filled in.
      shard_bytes: size at which a shard is closed; `close_shard` closes it earlier.

    Raises CheckpointError with one line if the folder can't be written or contains other files.
    """

    def __init__(
        self,
        folder: Path,
        hf_config: dict[str, Any],
        extension: Extension,
        *,
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._config = {key: value for key, value in hf_config.items() if key != QUANTIZATION}
        self._extension = extension
        self._shard_bytes = shard_bytes
        check_target(self.folder, overwrite=overwrite)
        self._layers: dict[str, LayerEntry] = {}
        self._ignored: list[str] = []
        self._tensors: dict[str, TensorInfo] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self.layer_bytes = 0
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = _PartialFolder(self.folder)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        self._folder_in_progress = self._partial.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._partial.remove()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all added tensors."""
        return sum(info.size for info in self._tensors.values()) + self._pending_bytes

    def add_layer(self, name: str, layer: QuantizedLayer) -> None:
        """Add a quantized layer. Raises CheckpointError if it can't be stored, or was added."""
        try:
            entry, tensors = encode(layer)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        self._layers[name] = entry
        for part, tensor in tensors.items():
            self.layer_bytes += tensor.numel() * tensor.element_size()
            self._add(f"{name}.{part}", tensor)

    def add_tensor(self, name: str, tensor: torch.Tensor, *, as_is: bool = False) -> None:
        """Add an unquantized tensor: as FP16, in which kernels compute, if it fits that.

        as_is: in its own type. Raises CheckpointError if it contains NaN or infinity, or was added
        before.
        """
        if tensor.is_floating_point():
            if not is_finite_or_bound(tensor):
                raise CheckpointError(f"{name} holds NaN or infinity: quantize another model")
            half = tensor.to(torch.float16)
            tensor = half if all_finite(half) and not as_is else tensor
        self._add(name, tensor)

    def leave_as_is(self, names: Iterable[str]) -> None:
        """Name linear layers that are not quantized, so that other readers ignore them."""
        self._ignored.extend(names)

    def add_file(self, path: Path) -> None:
        """Copy a file of the tokenizer or the model (generation_config.json) into the folder."""
        try:
            shutil.copyfile(path, self._folder_in_progress / path.name)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def close_shard(self) -> None:
        """Write the tensors added since the last shard to a new one, and release them."""
        if not self._pending:
            return
        path = self._folder_in_progress / f"{len(self._shards)}.safetensors"
        try:
            infos = write_tensors(path, self._pending)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        self._shards.append((path, sorted(infos)))
        self._tensors |= infos
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> str:
        """Write the last shard, the index and config.json, and move the folder. Return its content
        hash.

        Raises CheckpointError with one line if nothing was quantized or it can't be written.
        """
        if not self._layers:
            raise CheckpointError(
                f"{self.folder} would have no quantized layer: quantize by another scheme"
            )
        self.close_shard()
        try:
            self._write_index()
            config = self._described()
            _write_json(self._folder_in_progress / CONFIG, config)
            self._put_in_place()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return str(config[QUANTIZATION][SECTION]["content_hash"])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._tensors or name in self._pending:
            raise CheckpointError(f"{name} was added twice")
        on_cpu = tensor.detach().to("cpu").contiguous()
        if on_cpu.untyped_storage().nbytes() != on_cpu.numel() * on_cpu.element_size():
            on_cpu = on_cpu.clone()  # a view would keep its whole base tensor
        self._pending[name] = on_cpu
        self._pending_bytes += on_cpu.numel() * on_cpu.element_size()
        if self._pending_bytes >= self._shard_bytes:
            self.close_shard()

    def _write_index(self) -> None:
        if len(self._shards) == 1:
            os.rename(self._shards[0][0], self._folder_in_progress / WHOLE)
            return
        where: dict[str, str] = {}
        for index, (path, names) in enumerate(self._shards, start=1):
            name = f"model-{index:05}-of-{len(self._shards):05}.safetensors"
            os.rename(path, self._folder_in_progress / name)
            where |= dict.fromkeys(names, name)
        _write_json(
            self._folder_in_progress / INDEX,
            {"metadata": {"total_size": self.stored_bytes}, "weight_map": where},
        )

    def _described(self) -> dict[str, Any]:
        extension = self._extension.model_copy(
            update={"layers": self._layers, "files": vocabulary_digests(self._folder_in_progress)}
        )
        section = dumped_section(extension, tuple(self._ignored))
        config = {**self._config, QUANTIZATION: section}
        section[SECTION]["content_hash"] = content_hash(config, self._tensors)
        return config

    def _put_in_place(self) -> None:
        replaced = self.folder.with_name(f".{self.folder.name}.replaced-{os.getpid()}")
        if self.folder.is_dir():
            os.rename(self.folder, replaced)
        try:
            os.rename(self._folder_in_progress, self.folder)
        except OSError:
            if replaced.is_dir():
                os.rename(replaced, self.folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written there."""
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(f"{folder} is a link to nothing: give a folder")
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return
    except NotADirectoryError as error:
        raise CheckpointError(f"{folder} is a file: give a folder") from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    if not is_own_checkpoint(folder):
        raise CheckpointError(
            f"{folder} holds other files: give a new folder (only a checkpoint of ours is "
            "overwritten)"
        )
    if not overwrite:
        raise CheckpointError(
            f"{folder} holds a checkpoint already: give another folder, or --overwrite"
        )


def _cannot_write(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"can't write {folder}: {error.strerror or error}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class _PartialFolder:
    """A hidden folder `.NAME.partial-PID` beside `folder`; those of dead processes are removed.

    It is locked while its process lives: the lock is of the kernel, so that it ends with the
    process, however that ends. A file system
    without locks keeps what is there. Raises OSError if the folder can't be made.
    """

    def __init__(self, folder: Path) -> None:
        _remove_abandoned(folder)
        self.path = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _locked(self._lock)

    def remove(self) -> None:
        """Remove what is still there, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _locked(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
