"""Gzip files, recognized by their content, and written without names and times."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import BinaryIO, cast

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # raised while a damaged file is read
_MAGIC = b"\x1f\x8b"


@contextmanager
def unpacked(file: BufferedReader) -> Iterator[BufferedReader]:
    """Yield the content of a file opened at its start: decompressed if it is a gzip file.

    Reading it raises one of DAMAGED if the gzip file is cut off or damaged.
    """
    if not file.peek(len(_MAGIC)).startswith(_MAGIC):
        yield file
        return
    with gzip.GzipFile(fileobj=file) as packed, BufferedReader(packed) as content:
        yield cast(BufferedReader, content)


@contextmanager
def packing(file: BinaryIO, *, compress: bool, level: int = 9) -> Iterator[BinaryIO]:
    """Yield a file to write to: equal content gives equal bytes."""
    if not compress:
        yield file
        return
    with gzip.GzipFile(
        filename="", fileobj=file, mode="wb", mtime=0, compresslevel=level
    ) as packed:
        yield cast(BinaryIO, packed)
