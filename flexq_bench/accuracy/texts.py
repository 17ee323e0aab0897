"""Texts to measure perplexity on, put together as GPTQ's evaluation does (arXiv:2210.17323).

| kind | file | how its rows become one text |
| --- | --- | --- |
| wikitext | a .raw file; on the hub wikitext2 | rows with their line ends, joined by two newlines |
| c4 | a .jsonl file: `text`, or `prefix` and `gold_completion`; on the hub c4 | joined by spaces |
| ptb | a file whose name begins with ptb | lines without their ends, joined by spaces |
| text | any other file | as it is |
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy.errors import AccuracyError
from workloads.names import unknown

_C4_ROWS = 1100  # of the first validation shard, as GPTQ's code takes them


@dataclass(frozen=True, slots=True)
class Text:
    """A text by name. content_hash: SHA-256 of its file, or of the text that the hub gave."""

    name: str
    kind: str
    content: str
    content_hash: str


def read_text(spec: str) -> Text:
    """`PATH`, `KIND:PATH`, either of them after `NAME=`, or a data set on the hub by its name.

    Without NAME a text has the name of its kind, a plain file that of the file. Raises
    AccuracyError if there is no such file or data set, or it holds no text.
    """
    name, _, rest = spec.rpartition("=")
    kind, _, path = rest.rpartition(":")
    if kind and kind not in _KINDS:
        raise AccuracyError(f"{unknown('kind of text', kind, _KINDS)}; {path} is the file")
    if not kind and path in _ON_THE_HUB and not Path(path).exists():
        kind, content = path, _from_hub(path)
        raw = content
    else:
        file = Path(os.path.expanduser(path))
        kind = kind or _kind_of(file)
        raw = _read(file)
        content = _KINDS[kind](raw)
        name = name or (file.stem if kind == "text" else kind)
    if not content.strip():
        raise AccuracyError(f"{path} holds no text: give another file")
    return Text(name or kind, kind, content, hashlib.sha256(raw.encode()).hexdigest())


def tokenize(text: Text, tokenizer: Any) -> torch.Tensor:
    """tokens [T], int64, with what the tokenizer puts at the beginning, as in GPTQ's code."""
    # A text is longer than any context on purpose; the tokenizer's warning about it is not news.
    return torch.tensor(tokenizer(text.content, verbose=False).input_ids, dtype=torch.int64)


def _kind_of(file: Path) -> str:
    if file.suffix == ".raw":
        return "wikitext"
    if file.suffix == ".jsonl":
        return "c4"
    return "ptb" if file.name.startswith("ptb") else "text"


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # line ends as they are: the hash is the file's
    except OSError as error:
        raise AccuracyError(f"no text {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise AccuracyError(f"{file} is not UTF-8 text: give a text file") from error


def _wikitext(content: str) -> str:
    # The data set's loader keeps the line end of a row that is not blank.
    lines = content.split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines[:-1] or lines)


def _c4(content: str) -> str:
    return " ".join(_documents(content))


def _documents(content: str) -> Iterator[str]:
    # Not splitlines: a document may hold line separators of other kinds.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            document = row["text"] if "text" in row else row["prefix"] + row["gold_completion"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise AccuracyError(_no_document(number)) from error
        if not isinstance(document, str):
            raise AccuracyError(_no_document(number))
        yield document


def _no_document(line: int) -> str:
    return (
        f"line {line} is no document: each is a JSON object with `text`, or with `prefix` and "
        "`gold_completion`"
    )


def _ptb(content: str) -> str:
    return " ".join(line.strip() for line in content.splitlines())


_KINDS: dict[str, Callable[[str], str]] = {
    "wikitext": _wikitext,
    "c4": _c4,
    "ptb": _ptb,
    "text": str,
}
_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "wikitext2": {
        "path": "Salesforce/wikitext",
        "name": "wikitext-2-raw-v1",
        "split": "test",
    },
    "c4": {
        "path": "allenai/c4",
        "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
        "split": "validation",
    },
}


def _from_hub(name: str) -> str:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise AccuracyError(
            f"no file {name}, and fetching that data set needs the package `datasets`: install "
            "flexq-bench[accuracy], or give a file"
        ) from error
    try:
        rows = load_dataset(**_ON_THE_HUB[name])["text"]
    except Exception as error:  # what a network and a server can do is not one class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise AccuracyError(
            f"no file {name}, and the hub did not give that data set ({reason[0]}): give a file"
        ) from error
    return "\n\n".join(rows) if name == "wikitext2" else " ".join(rows[:_C4_ROWS])
