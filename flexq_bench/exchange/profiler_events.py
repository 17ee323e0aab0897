"""Events of a trace in Chrome's JSON format, of an untrusted file, with bounded memory.

Written by `torch.profiler`: an object with `traceEvents`, or only that list; plain or gzip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import text_chunks

WHAT = "a trace of torch.profiler (export_chrome_trace)"
_MAX_BYTES = 1 << 33  # of the text, after decompression
_MAX_VALUE_CHARS = 1 << 22  # of an event, or of another value of the file
_MAX_EVENTS = 50_000_000
_WHITE = " \t\r\n"


def trace_events(path: str) -> Iterator[dict[str, Any]]:
    """Iterate over the events of a file, one in memory at a time.

    Raises UsageError if it can't be read, is no trace, or is larger than its bounds, also while
    it iterates.
    """
    scanner = _Scanner(path)
    first = scanner.take("{[")
    if first == "[":
        yield from _events(scanner, path)
        return
    while scanner.peek() != "}":
        name = scanner.value()
        scanner.take(":")
        if name == "traceEvents":
            scanner.take("[")
            yield from _events(scanner, path)
        else:
            scanner.value()
        if scanner.take(",}") == "}":
            return


def _events(scanner: _Scanner, path: str) -> Iterator[dict[str, Any]]:
    """Iterate over the objects of a list whose bracket was read."""
    if scanner.peek() == "]":
        scanner.take("]")
        return
    for _ in range(_MAX_EVENTS):
        event = scanner.value()
        if isinstance(event, dict):
            yield event
        if scanner.take(",]") == "]":
            return
    raise UsageError(f"{path} has more than {_MAX_EVENTS:,} events: profile fewer steps")


class _Scanner:
    """Values and separators of a JSON text that is read in chunks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._chunks = text_chunks(path, WHAT, most_bytes=_MAX_BYTES)
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """Return the next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _WHITE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def take(self, expected: str) -> str:
        """Skip one of these characters, and return it. Raises UsageError if it is another one."""
        character = self.peek()
        if not character or character not in expected:
            raise self._no_trace()
        self._at += 1
        return character

    def value(self) -> Any:
        """Return the next value. Raises UsageError if there is none, or if it is too long."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):
                end = len(self._text)  # unless it goes on in the next chunk
            # A number may go on in the next chunk, too.
            if end < len(self._text):
                self._at = end
                return value
            if len(self._text) - self._at > _MAX_VALUE_CHARS or not self._read():
                raise self._no_trace()

    def _read(self) -> bool:
        """Add a chunk, and drop what was taken. False at the end."""
        chunk = next(self._chunks, "")
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _no_trace(self) -> UsageError:
        return UsageError(f"{self._path} is no trace, or it is cut off: name {WHAT}")
