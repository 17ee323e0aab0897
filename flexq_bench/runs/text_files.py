"""Reading of small text files given on the command line, with a size limit."""

from __future__ import annotations

import codecs
from pathlib import Path

from flexq_bench.errors import UsageError


def read_text(path: str, what: str, *, most_bytes: int, pipes: bool = False) -> str:
    """Read a text file in UTF-8, or in UTF-16 if it has a byte order mark (Windows programs).

    what: the expected kind of file for errors, for example `a CSV file`.

    pipes: accept also files that are not regular, such as a shell's `<(command)`, which may block.
    Raises UsageError if it is not a regular file, is larger than most_bytes, can't be read or is no
    text. Messages contain none of its content.
    """
    file = Path(path)
    try:
        # Checked before opening, because opening a pipe blocks until there is a writer.
        if not pipes and file.exists() and not file.is_file():
            raise UsageError(f"{path} can't be read: it is no regular file: name {what}")
        with file.open("rb") as opened:
            content = opened.read(most_bytes + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path} can't be read: {reason}: name {what}") from error
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"{path!r} can't be read: it is no name of a file: name {what}") from error
    if len(content) > most_bytes:
        raise UsageError(
            f"{path} can't be read: it is larger than {most_bytes:,} bytes: name a smaller one"
        )
    try:
        return content.decode(_encoding(content))
    except UnicodeDecodeError:
        # `from None`, because the cause contains the content, which --debug would print.
        raise UsageError(f"{path} can't be read: it is no text in UTF-8: name {what}") from None


def _encoding(content: bytes) -> str:
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if is_utf16 else "utf-8-sig"
