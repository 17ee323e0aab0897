"""Reading of text files given on the command line, plain or gzip, with a size limit."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from flexq_bench.db.gzip_files import DAMAGED, unpacked
from flexq_bench.errors import UsageError


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
        encoding, letters = _encoding(file.peek(4)), 0
        # Ends of lines are kept: a quoted cell of a CSV file has its own.
        text = io.TextIOWrapper(file, encoding, newline="")
        while line := text.readline(longest + 1):
            if len(line) > longest:
                raise UsageError(f"{path} has a line of over {longest:,} letters: name {what}")
            letters += len(line)
            if letters > most_bytes:  # of a gzip file
                raise _too_large(path, most_bytes)
            yield line


def text_chunks(path: str, what: str, *, most_bytes: int, size: int = 1 << 20) -> Iterator[str]:
    """Iterate over the text of a file, in pieces of up to `size` bytes.

    most_bytes: of the text. Raises UsageError like `read_text`, also while it iterates.
    """
    with _opened(path, what) as file:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        done = 0
        while chunk := file.read(size):
            done += len(chunk)
            if done > most_bytes:
                raise _too_large(path, most_bytes)
            yield decoder.decode(chunk)
        decoder.decode(b"", final=True)


@contextmanager
def _opened(path: str, what: str, *, pipes: bool = False) -> Iterator[BufferedReader]:
    file = Path(path)
    try:
        # Checked before opening, because opening a pipe blocks until there is a writer.
        if not pipes and file.exists() and not file.is_file():
            raise UsageError(f"{path} can't be read: it is no regular file: name {what}")
        with file.open("rb") as opened, unpacked(opened) as content:
            yield content
    except DAMAGED:
        raise UsageError(
            f"{path} can't be read: the gzip file is cut off or damaged: copy it again"
        ) from None
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
