"""Interface of a quantized checkpoint of any tool, for accuracy, decode and gates."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from flexq_bench.checkpoints.config import StoredCalibration, StoredScheme
from flexq_bench.checkpoints.errors import HEAD, own_head_error
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.quantized_layer import QuantizedLayer


class QuantizedCheckpoint(ABC):
    """Quantized layers by name, and the unquantized tensors of a model.

    folder:           path of the checkpoint.
    config:           Hugging Face's configuration, without `quantization_config`.
    scheme:           scheme that produced it.
    calibration:      calibration of the scheme; None: not calibrated, or not known.
    kv_bits:          of cached keys and values: 16, 8 or 4.
    content_hash:     SHA-256, hexadecimal, of everything that affects results.
    is_synthetic:     the weights are random, of a model's true shapes: for timing only.
    layers:           names of the quantized linear layers, `model.layers.0.self_attn.q_proj`.
    tensor_names:     of unquantized tensors: norms, embeddings, head, biases of other layers.
    dense_formats:    of weights that are codes in the files and numbers here, the nearest formats.
    tokenizer_folder: folder of the tokenizer's files.
    """

    folder: Path
    config: dict[str, Any]
    scheme: StoredScheme
    calibration: StoredCalibration | None = None
    kv_bits: int
    content_hash: str
    is_synthetic: bool = False
    layers: tuple[str, ...]
    tensor_names: tuple[str, ...]
    dense_formats: Mapping[str, NumberFormat] = MappingProxyType({})

    def hash_with_cache(self, kv_bits: int) -> str:
        """Content hash of this checkpoint with a KV cache of these bits.

        Equals the folder's hash if these are its own bits.
        """
        if kv_bits == self.kv_bits:
            return self.content_hash
        return hashlib.sha256(f"{self.content_hash} kv{kv_bits}".encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder

    @property
    def model_name(self) -> str:
        """Name of the original model if stored; otherwise of the folder."""
        made_of = Path(str(self.config.get("_name_or_path") or "")).name
        return made_of or self.folder.resolve().name

    @abstractmethod
    def has_bias(self, name: str) -> bool:
        """Return True if a layer of `layers` has a bias."""

    def check_tied_head(self, embedding: str, name: str = HEAD) -> None:
        """Raise CheckpointError if it has an output head although the configuration ties it.

        embedding: name of the embedding that the head is tied to. name: of the head.
        """
        if name in self.tensor_names and embedding in self.tensor_names:
            head, words = self.tensor(name), self.tensor(embedding)
            if head.shape != words.shape or not torch.equal(head.float(), words.float()):
                raise own_head_error(self.folder, embedding, name)

    def fp8_cache_scales(self, block: int) -> torch.Tensor | None:
        """Scales of a block's cached keys and values in E4M3, FP32 [2, KV heads] or [2, 1].

        None: they are not rounded to FP8.
        """
        return None

    def fp8_cache_scales_of_blocks(self) -> list[torch.Tensor] | None:
        """Scales of all blocks, see fp8_cache_scales; None: they are not rounded to FP8."""
        blocks = range(int(self.config.get("num_hidden_layers") or 0))
        scales = [self.fp8_cache_scales(block) for block in blocks]
        return [of_block for of_block in scales if of_block is not None] or None

    @abstractmethod
    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        """Read one layer. Raises CheckpointError in one line if there is none or it is damaged."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Read one unquantized tensor to the CPU. Raises CheckpointError as `layer`."""
