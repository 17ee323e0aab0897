"""A quantized checkpoint as accuracy, decode and gates see it, whoever made it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from flexq_bench.checkpoints.config import StoredCalibration, StoredScheme
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_HEAD = "lm_head.weight"


class QuantizedCheckpoint(ABC):
    """Quantized layers by name, and the tensors of a model that are not quantized.

    folder:           where it is.
    config:           Hugging Face's configuration, without `quantization_config`.
    scheme:           what made it.
    calibration:      what the scheme learned from; None: from nothing, or it is not known.
    kv_bits:          of cached keys and values: 16, 8 or 4.
    content_hash:     SHA-256, hexadecimal, of everything that decides numbers.
    is_synthetic:     the weights are random, of a model's true shapes: for speed, not for sense.
    layers:           names of the quantized linear layers, `model.layers.0.self_attn.q_proj`.
    tensor_names:     of what is not quantized: norms, embeddings, head, biases of other layers.
    tokenizer_folder: where the tokenizer's files are.
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

    def hash_with_cache(self, kv_bits: int) -> str:
        """Content hash of this checkpoint served with a cache of so many bits.

        That of the folder, if these are its bits.
        """
        if kv_bits == self.kv_bits:
            return self.content_hash
        return hashlib.sha256(f"{self.content_hash} kv{kv_bits}".encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder

    @property
    def model_name(self) -> str:
        """Name of the model that it was made of, where it says that; else of its folder."""
        made_of = Path(str(self.config.get("_name_or_path") or "")).name
        return made_of or self.folder.resolve().name

    @abstractmethod
    def has_bias(self, name: str) -> bool:
        """True if a layer of `layers` has a bias."""

    def check_tied_head(self, embedding: str) -> None:
        """Raise CheckpointError if it has an output head beside the embedding that is to be it.

        embedding: name of the embedding, of a model whose configuration ties the two.
        """
        if _HEAD in self.tensor_names and embedding in self.tensor_names:
            head, words = self.tensor(_HEAD), self.tensor(embedding)
            if head.shape != words.shape or not torch.equal(head.float(), words.float()):
                raise CheckpointError(
                    f"{self.folder}: {_HEAD} is not {embedding}, and config.json says that they "
                    'are one ("tie_word_embeddings"): set that to false if the model has a head '
                    "of its own"
                )

    @abstractmethod
    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        """Read one layer. Raises CheckpointError in one line if there is none or it is damaged."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor that is not quantized, to the CPU. Raises CheckpointError as `layer`."""
