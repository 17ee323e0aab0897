"""A checkpoint in the format that `flexq-bench quantize` writes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import (
    QUANTIZATION,
    dumped_section,
    read_section,
)
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.checkpoints.hashing import content_hash, vocabulary_digests
from flexq_bench.checkpoints.layers import decode, is_finite_or_bound, specs
from flexq_bench.checkpoints.safetensors_io import (
    DTYPES,
    read_tensor,
    with_digest,
)
from flexq_bench.schemes.model_files import CONFIG, read_json
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_AGAIN = "copy the folder again, or quantize again"
BLOCK = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


class StoredCheckpoint(QuantizedCheckpoint):
    """Checkpoint in the project's own format, from `open_checkpoint`."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / CONFIG)
        section = read_section(config[QUANTIZATION], str(folder))
        extension = section.flexq_bench
        self.folder = folder
        self._section = section
        self.config = {key: value for key, value in config.items() if key != QUANTIZATION}
        self.scheme = extension.scheme
        self.calibration = extension.calibration
        self.kv_bits = extension.kv_bits
        self.content_hash = extension.content_hash
        self.is_synthetic = extension.synthetic
        self.layers = tuple(extension.layers)
        self._entries = extension.layers
        self._infos = {
            name: info if info.digest else with_digest(info, name)  # of a shard by another program
            for name, info in FolderTensors(folder).infos.items()
        }
        self._check_structure()
        if vocabulary_digests(folder) != extension.files:
            raise CheckpointError(f"{folder}: its tokenizer is not the one it was made with")
        if content_hash(config, self._infos) != self.content_hash:
            raise CheckpointError(
                f"{folder}: its content hash is not the one that its {CONFIG} names: {_AGAIN}"
            )
        parts = {f"{name}.{part}" for name, entry in self._entries.items() for part in specs(entry)}
        self.tensor_names = tuple(sorted(set(self._infos) - parts))

    def hash_with_cache(self, kv_bits: int) -> str:
        """The hash of the checkpoint that `quantize --kv-bits` would write instead of this one."""
        if kv_bits == self.kv_bits:
            return self.content_hash
        extension = self._section.flexq_bench.model_copy(update={"kv_bits": kv_bits})
        ignored = tuple(name for name in self._section.ignore if name not in self._entries)
        section = dumped_section(extension, ignored)
        return content_hash({**self.config, QUANTIZATION: section}, self._infos)

    def has_bias(self, name: str) -> bool:
        return self._entries[name].bias

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        """Read one layer. Raises CheckpointError in one line if there is none or it is damaged."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no quantized layer {name}")
        tensors = {}
        for part in specs(entry):
            full = f"{name}.{part}"
            tensors[part] = read_tensor(self._infos[full], full).to(device)
        try:
            return decode(entry, tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {name}: {error}: {_AGAIN}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """Read one unquantized tensor to the CPU. Raises CheckpointError as `layer`."""
        if name not in self.tensor_names:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        tensor = read_tensor(self._infos[name], name)
        if tensor.is_floating_point() and not is_finite_or_bound(tensor):
            raise CheckpointError(f"{self.folder}: {name} holds NaN or infinity: {_AGAIN}")
        return tensor

    def _check_structure(self) -> None:
        for name, entry in self._entries.items():
            for part, (dtype, shape) in specs(entry).items():
                info = self._infos.get(f"{name}.{part}")
                if info is None:
                    raise CheckpointError(f"{self.folder} lacks {name}.{part}: {_AGAIN}")
                if DTYPES[info.dtype] != dtype or info.shape != shape:
                    raise CheckpointError(
                        f"{self.folder}: {name}.{part} is {info.dtype} {list(info.shape)}, its "
                        f"{CONFIG} says {str(dtype).removeprefix('torch.')} {list(shape)}: {_AGAIN}"
                    )
