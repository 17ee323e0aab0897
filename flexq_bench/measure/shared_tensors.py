"""Named tensors that a judging process and its worker pass each other in shared memory.

Each side of the exchange writes one file of a memory file system and reads the other's. Neither
maps the other's file: a process that shortened one would end whoever reads a mapping of it. The
first tensor imports torch, because the files are needed before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

_MEMORY = Path("/dev/shm")
# A container's may be small, as Docker's 64 MB are. Then files are in the folder of others.
_MIN_FREE_BYTES = 4 << 30
_ALIGNMENT = 64  # bytes
Layout = Sequence[tuple[str, str, Sequence[int]]]  # name, data type and shape, in the file's order


class Exchange:
    """The judge's end: tensors are written to `inputs`, and the worker's read from `outputs`."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.outputs = folder / "inputs", folder / "outputs"
        # Kept open: a worker without a sandbox may put other files into the folder.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._inputs, self._outputs = os.open(self.inputs, flags), os.open(self.outputs, flags)
        os.fchmod(self._inputs, 0o644)  # in a sandbox, the worker is another user
        os.fchmod(self._outputs, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        os.close(self._inputs)
        os.close(self._outputs)

    def give(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Write tensors for the worker; return what `read_tensors` needs to read them."""
        layout = layout_of(tensors)
        _write(self._inputs, tensors, layout)
        return layout

    def take(self, layout: Layout) -> dict[str, torch.Tensor]:
        """The tensors that the worker wrote since the last call, on the host.

        Raises ValueError if it wrote others than these, or none.
        """
        size = os.fstat(self._outputs).st_size
        expected = _ends(layout)[-1] if layout else 0
        if size != expected:
            raise ValueError(f"{size:,} bytes in place of {expected:,}")
        tensors = _read(self._outputs, layout)
        os.ftruncate(self._outputs, 0)
        return tensors


@contextmanager
def exchanges(*names: str) -> Iterator[dict[str, Exchange]]:
    """Exchanges by name, each with a folder of its own."""
    with exchange_folder() as folder, ExitStack() as stack:
        made = {}
        for name in names:
            (folder / name).mkdir()
            made[name] = stack.enter_context(Exchange(folder / name))
        yield made


@contextmanager
def exchange_folder() -> Iterator[Path]:
    """A private folder for the files of exchanges, in memory where there is enough of it."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MIN_FREE_BYTES
    with tempfile.TemporaryDirectory(dir=_MEMORY if has_room else None) as folder:
        yield Path(folder)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Names, data types and shapes, as JSON values."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def read_tensors(
    path: Path, layout: Sequence[Sequence[Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """The worker's end of `Exchange.give`: the tensors, in memory of their own.

    Raises ValueError if the file is too short, OSError if it can't be read.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        plain = [(str(name), str(dtype), list(shape)) for name, dtype, shape in layout]
        return {name: tensor.to(device) for name, tensor in _read(file, plain).items()}
    finally:
        os.close(file)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The worker's end of `Exchange.take`. Raises OSError if the file can't be written."""
    file = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        _write(file, tensors, layout_of(tensors))
    finally:
        os.close(file)


def _ends(layout: Layout) -> list[int]:
    """Ends of the tensors, in bytes from the start of the file."""
    ends: list[int] = []
    for _, dtype, shape in layout:
        start = -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT if ends else 0
        ends.append(start + _size(dtype, shape))
    return ends


def _size(dtype: str, shape: Sequence[int]) -> int:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or any(length < 0 for length in shape):
        raise ValueError(f"no tensor of {dtype} and shape {list(shape)}")
    return kind.itemsize * prod(shape)


def _write(file: int, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    for tensor, end in zip(tensors.values(), _ends(layout), strict=True):
        content = memoryview(_bytes_of(tensor.detach().cpu().contiguous()))
        at = end - len(content)
        while content:
            written = os.pwrite(file, content, at)
            content, at = content[written:], at + written


def _read(file: int, layout: Layout) -> dict[str, torch.Tensor]:
    import torch

    tensors = {}
    for (name, dtype, shape), end in zip(layout, _ends(layout), strict=True):
        tensor = torch.empty(list(shape), dtype=getattr(torch, dtype), device="cpu")
        content = memoryview(_bytes_of(tensor))
        at = end - len(content)
        while content:
            read = os.preadv(file, [content], at)
            if not read:
                raise ValueError(f"{name} is shorter than {_size(dtype, shape):,} bytes")
            content, at = content[read:], at + read
        tensors[name] = tensor
    return tensors


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the host, as a NumPy array of bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()
