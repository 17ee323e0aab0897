"""Tensors of a folder, by name, read and checked one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.safetensors_io import DTYPES, TensorInfo, read_header, read_tensor
from flexq_bench.schemes.model_files import (
    check_index,
    merged_tensors,
    safetensors_files,
)

HALVES = (torch.float16, torch.bfloat16)
REALS = (*HALVES, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class FolderTensors:
    """The tensors of a folder's safetensors files, by name.

    Raises UsageError with one line if a file is missing, truncated or damaged, if two files have
    the same tensor, or if the index names another file for one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.infos: Mapping[str, TensorInfo] = merged_tensors(
            safetensors_files(folder), read_header
        )
        check_index(folder, {name: info.path for name, info in self.infos.items()})

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.infos[name].dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises CheckpointError if there is no such tensor."""
        return self._info(name).shape

    def take(
        self,
        name: str,
        dtypes: Collection[torch.dtype],
        *shapes: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Read a tensor. shapes: the allowed ones; none given: any.

        Raises CheckpointError if it is missing, or has another dtype or shape.
        """
        info = self._info(name)
        if DTYPES[info.dtype] not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{self.folder.name}: {name} is {info.dtype}, expected {wanted}: its config.json "
                "is of another model, or its layout is none that is read here"
            )
        if shapes and info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self.folder.name}: {name} is {list(info.shape)}, expected {wanted}: its "
                "config.json is of another model"
            )
        return read_tensor(info, name).to(device)

    def _info(self, name: str) -> TensorInfo:
        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder.name} has no tensor {name}: copy the folder again")
        return info
