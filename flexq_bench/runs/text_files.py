"""Reading of small text files given on the command line, with a size limit."""

from __future__ import annotations

import codecs
import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from flexq_bench.errors import UsageError

_GZIP = b"\x1f\x8b"


def read_text(path: str, what: str, *, most_bytes: int, pipes: bool = False) -> str:
    """Read a text file in UTF-8, or in UTF-16 if it has a byte order mark (Windows programs).

    what: the expected kind of file for errors, for example `a CSV file`.

    pipes: accept also files that are not regular, such as a shell's `<(command)`, which may block.
    Raises UsageError if it is not a regular file, is larger than most_bytes, can't be read or is no
    text. Messages contain none of its content.
    """
    with _opened(path, what, pipes=pipes) as file:
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise _too_large(path, most_bytes)
        return content.decode(_encoding(content))


def text_lines(path: str, what: str, *, most_bytes: int, longest: int = 1 << 20) -> Iterator[str]:
    """Iterate over the lines of a text file, with their ends, a line in memory at a time.

    Raises UsageError like `read_text`, also while it iterates, and for a line of more than
    `longest` letters.
    """
    with _opened(path, what) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise _too_large(path, most_bytes)
        encoding = _encoding(file.read(4))
        file.seek(0)
        # Ends of lines are kept: a quoted cell of a CSV file has its own.
        text = io.TextIOWrapper(file, encoding, newline="")
        while line := text.readline(longest + 1):
            if len(line) > longest:
                raise UsageError(f"{path} has a line of over {longest:,} letters: name {what}")
            yield line


def text_chunks(path: str, what: str, *, most_bytes: int, size: int = 1 << 20) -> Iterator[str]:
    """Iterate over the text of a file, plain or gzip, in pieces of up to `size` bytes.

    most_bytes: of the text. Raises UsageError like `read_text`, also while it iterates; EOFError,
    OSError or zlib.error for a damaged gzip file.
    """
    with _opened(path, what) as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        source = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        done = 0
        while chunk := source.read(size):
            done += len(chunk)
            if done > most_bytes:
                raise _too_large(path, most_bytes)
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)


@contextmanager
def _opened(path: str, what: str, *, pipes: bool = False) -> Iterator[BinaryIO]:
    file = Path(path)
    try:
        # Checked before opening, because opening a pipe blocks until there is a writer.
        if not pipes and file.exists() and not file.is_file():
            raise UsageError(f"{path} can't be read: it is no regular file: name {what}")
        with file.open("rb") as opened:
            yield opened
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path} can't be read: {reason}: name {what}") from error
    except UnicodeError:
        # `from None`, because the cause contains the content, which --debug would print.
        raise UsageError(f"{path} can't be read: it is no text in UTF-8: name {what}") from None
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"{path!r} can't be read: it is no name of a file: name {what}") from error


def _too_large(path: str, most_bytes: int) -> UsageError:
    return UsageError(
        f"{path} can't be read: it is larger than {most_bytes:,} bytes: name a smaller one"
    )


def _encoding(content: bytes) -> str:
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if is_utf16 else "utf-8-sig"
