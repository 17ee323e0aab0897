"""Hash of a checkpoint's content: everything that affects results, independent of file names.

SHA-256 over the deciding parts of config.json (`config.deciding`: Hugging Face's configuration, the
formats, the scheme with its options and seed, the bits of keys and values, the digests of the
tokenizer's files) and over name, dtype, shape and the digest of the bytes of each tensor in the
order of names. Sharding, paths, the versions of libraries and the record of the calibration are not
part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexq_bench.checkpoints.config import deciding
from flexq_bench.checkpoints.safetensors_io import TensorInfo

# The files that map tokens to numbers; the tokenizer's other files configure its use.
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def content_hash(config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The hash, hexadecimal. config: the whole config.json; its own content_hash is excluded."""
    digest = hashlib.sha256()
    digest.update(json.dumps(deciding(config), sort_keys=True, separators=(",", ":")).encode())
    for name, info in sorted(tensors.items()):
        line = (name, info.dtype, list(info.shape), info.digest)
        digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def vocabulary_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of VOCABULARY in a folder, by name."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in VOCABULARY
        if (folder / name).is_file()
    }
