"""Small text files that a person names on the command line, read no further than a bound."""

from __future__ import annotations

from pathlib import Path

from flexq_bench.errors import UsageError


def read_text(
    path: str, what: str, *, most_bytes: int, encoding: str = "utf-8", pipes: bool = False
) -> str:
    """The text of a file. what: a name of it for errors, for example `a CSV file`.

    pipes: take also what is no regular file, such as a shell's `<(command)`; it may be waited for
    without end. Raises UsageError for any other that is none, is larger than most_bytes, can't be
    read or is no text. No message holds any of its content.
    """
    file = Path(path)
    try:
        # Asked before it is opened: opening a pipe waits for somebody who writes to it.
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
        return content.decode(encoding)
    except UnicodeDecodeError:
        # Not as the cause: it holds the content, which --debug would print.
        raise UsageError(f"{path} can't be read: it is no text: name {what}") from None
