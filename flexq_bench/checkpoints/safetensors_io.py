"""Safetensors files read and written tensor by tensor, without memory mapping.

The format (https://huggingface.co/docs/safetensors): eight bytes, little-endian, the length of a
JSON header; the header, name -> dtype, shape and data_offsets from its end, `__metadata__` of
strings; the tensors' bytes. Pages of a mapped file would count as memory of the reading process;
here a tensor's bytes are read directly into the tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.schemes.strict_json import loads_strictly

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U32": torch.uint32,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_DIGESTS = "sha256"  # in the metadata: digest of each tensor's bytes, as JSON
_MAX_HEADER_BYTES = 100_000_000  # bytes, the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file, not read yet. dtype: safetensors' name. start: byte in the file.

    digest: SHA-256 of its bytes from the file's header; "": the header has none.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    digest: str

    def rows(self, index: int, start: int, count: int) -> TensorInfo:
        """Rows of matrix `index` of a tensor [matrices, rows, K], which is contiguous."""
        _, rows, k = self.shape
        width = self.size // math.prod(self.shape[:2])
        begin = self.start + (index * rows + start) * width
        return TensorInfo(self.path, self.dtype, (count, k), begin, count * width, "")


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order, hexadecimal."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Write CPU tensors to one file, flush it to the disk, and return their locations.

    Raises OSError if that fails, and CheckpointError for a dtype that safetensors lacks.
    """
    infos: dict[str, TensorInfo] = {}  # with positions from the end of the header
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors has no name for")
        size = tensor.numel() * tensor.element_size()
        dtype, shape = _NAMES[tensor.dtype], tuple(tensor.shape)
        infos[name] = TensorInfo(path, dtype, shape, position, size, digest_of(tensor))
        position += size
    header: dict[str, Any] = {
        _METADATA: {
            "format": "pt",
            _DIGESTS: json.dumps(
                {name: info.digest for name, info in infos.items()}, sort_keys=True
            ),
        }
    }
    for name, info in infos.items():
        offsets = [info.start, info.start + info.size]
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in infos:
            file.write(_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())
    begin = 8 + len(text)
    return {name: replace(info, start=begin + info.start) for name, info in infos.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in a file's header that are not about single tensors.

    Raises CheckpointError as read_header.
    """
    read_header(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        metadata = json.loads(file.read(length)).get(_METADATA, {})
    return {str(key): str(value) for key, value in metadata.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file; checks that they fill it exactly.

    Raises CheckpointError with one line if it is missing, truncated or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes of {size}")
            header = loads_strictly(file.read(length))
        metadata = header.pop(_METADATA, {})
        digests = json.loads(metadata.get(_DIGESTS, "{}"))
        infos = {
            name: _info(path, entry, 8 + length, digests.get(name, ""))
            for name, entry in header.items()
        }
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: copy the folder again") from error
    except PermissionError as error:
        raise CheckpointError(f"can't read {path}: permission denied") from error
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, struct.error),
        RecursionError,  # of a nested header
    ) as error:
        raise CheckpointError(f"{path} is cut off or damaged ({error}): copy it again") from error
    position = 8 + length
    for info in sorted(infos.values(), key=lambda info: info.start):
        if info.start != position:
            raise CheckpointError(f"{path} is damaged: its tensors leave gaps: copy it again")
        position += info.size
    if position != size:
        raise CheckpointError(
            f"{path} is cut off or damaged: it has {size:,} bytes, its header says {position:,}: "
            "copy it again"
        )
    return infos


def read_tensor(info: TensorInfo, name: str) -> torch.Tensor:
    """Read one tensor into new memory and compare its bytes with the stored digest.

    Raises CheckpointError with one line if they differ.
    """
    data = torch.empty(info.size, dtype=torch.uint8)
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.start)
            view, done = _bytes(data), 0
            while done < info.size:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{info.path} is cut off in {name}: copy it again")
                done += count
    except OSError as error:
        raise CheckpointError(f"can't read {info.path}: {error.strerror}") from error
    if info.digest and digest_of(data) != info.digest:
        raise CheckpointError(
            f"{info.path} is damaged: the bytes of {name} are not those that were written: copy "
            "it again"
        )
    return data.view(DTYPES[info.dtype]).view(info.shape)


def with_digest(info: TensorInfo, name: str) -> TensorInfo:
    """Return the location with the digest of the tensor's bytes, which are read."""
    return replace(info, digest=digest_of(read_tensor(info, name)))


def with_digests(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors by name, each as with_digest: a thread for each core reads them."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(infos, threads.map(with_digest, infos.values(), infos), strict=True))


def _info(path: Path, entry: dict[str, Any], begin: int, digest: str) -> TensorInfo:
    start, stop = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"{path} has tensors of type {entry['dtype']!s:.20}; read here are {', '.join(DTYPES)}"
        )
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start < 0 or stop - start != size:
        raise ValueError("a tensor's shape and bytes disagree")
    return TensorInfo(path, entry["dtype"], shape, begin + start, size, digest)


def _bytes(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single value may have any stride
    return flat.view(torch.uint8).numpy().data
