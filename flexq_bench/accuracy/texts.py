"""Texts for perplexity, assembled as in GPTQ's evaluation (arXiv:2210.17323).

| kind | file | how its rows become one text |
| --- | --- | --- |
| wikitext | a .raw file; on the hub wikitext2 | rows with their line ends, joined by two newlines |
| c4 | a .jsonl file: `text`, or `prefix` and `gold_completion`; on the hub c4 | joined by spaces |
| ptb | a file whose name begins with ptb | lines without their ends, joined by spaces |
| c4-gptq | as c4, given as c4-gptq:FILE | windows drawn from its long documents |
| ptb-gptq | as ptb, given as ptb-gptq:FILE | lines joined by two newlines |
| text | any other file | unchanged |

c4 and ptb are the newer variants of that code ("c4-new", "ptb-new"). The tables of GPTQ, OmniQuant
and most later papers use the older variants under these names, which are c4-gptq and ptb-gptq here:
of C4's first validation shard and of PTB's validation set.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.errors import library_reason
from flexq_bench.workloads.names import unknown

_C4_ROWS = 1100  # rows of the first validation shard, as in GPTQ's code
DRAWN = "c4-gptq"  # the kind with drawn windows
DOCUMENT_END = "\f"  # between the documents of a plain text
_DRAWN_WINDOWS, _DRAWN_SEED = 256, 0
_HEADING = r"(?m)^ = [^=\n]+ = $"  # of an article of WikiText


@dataclass(frozen=True, slots=True)
class Text:
    """A text by name. content_hash: SHA-256 of its file, or of the text from the hub.

    documents: from which windows are drawn (c4-gptq); empty: `content` is one sequence. starts:
    where its documents begin in `content`; empty: it is one document. context: tokens of a segment,
    at most; None: those of the evaluation. seed: its segments are a sample in random order; None:
    they are in the text's order. segments: so many are evaluated, unless a planned test needs more;
    None: all. parts: the texts of which the segments are taken (strata.RARE).
    """

    name: str
    kind: str
    content: str
    content_hash: str
    documents: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    context: int | None = None
    seed: int | None = None
    segments: int | None = None
    parts: tuple[Text, ...] = ()

    def segment_tokens(self, context: int) -> int:
        """Return the tokens of a segment in an evaluation with this context."""
        return context if self.context is None else min(context, self.context)


def read_text(spec: str) -> Text:
    """Read a text: `PATH` or `KIND:PATH`, optionally after `NAME=`, or a data set on the hub.

    Without NAME a text has the name of its kind, or for plain text of its file. Raises
    AccuracyError if there is no such file or data set, or it contains no text.
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
    documents = tuple(_documents(raw)) if kind == DRAWN else ()
    hashed = hashlib.sha256(raw.encode()).hexdigest()
    return Text(name or kind, kind, content, hashed, documents, _starts(kind, raw, content))


def _starts(kind: str, raw: str, content: str) -> tuple[int, ...]:
    """Return the offsets at which documents begin in the content of a text, if that is known."""
    if kind == "c4":
        ends = accumulate(len(document) + 1 for document in _documents(raw))
        return (0, *list(ends)[:-1])
    pattern = _HEADING if kind == "wikitext" else re.escape(DOCUMENT_END)
    return tuple(match.start() for match in re.finditer(pattern, content))


def tokenize(text: Text, tokenizer: Any) -> torch.Tensor:
    """Return tokens [T], int64, with the tokenizer's special tokens, as in GPTQ's code.

    Raises AccuracyError for a text with drawn windows, whose length depends on the context.
    """
    if text.documents:
        raise AccuracyError(f"{text.name} is {DRAWN}, which is for `accuracy` alone: give c4:FILE")
    # Texts are longer than any context, so the tokenizer's warning about it is suppressed.
    return torch.tensor(tokenizer(text.content, verbose=False).input_ids, dtype=torch.int64)


def drawn_windows(
    text: Text, tokens_of: Callable[[str], list[int]], length: int
) -> Iterator[list[int]]:
    """Draw windows of `length` tokens at random places of long documents: C4 as in the papers.

    They are drawn as in GPTQ's code (arXiv:2210.17323), with its seed, so that the same file and
    tokenizer give the same windows. tokens_of: tokenizes one document. A document of exactly
    `length` tokens, on which that code fails, is skipped. Raises AccuracyError if no document is
    longer.
    """
    drawn = random.Random(_DRAWN_SEED)
    read: dict[int, list[int]] = {}
    for _ in range(_DRAWN_WINDOWS):
        while len(read) < len(text.documents) or any(len(ids) > length for ids in read.values()):
            chosen = drawn.randint(0, len(text.documents) - 1)
            if chosen not in read:
                ids = tokens_of(text.documents[chosen])
                read[chosen] = ids if len(ids) > length else []
            if read[chosen]:
                break
        else:
            raise AccuracyError(
                f"no document of {text.name} has more than {length} tokens: give a shorter "
                "--context, or c4:FILE"
            )
        start = drawn.randint(0, len(read[chosen]) - length - 1)
        yield read[chosen][start : start + length]


def _kind_of(file: Path) -> str:
    if file.suffix == ".raw":
        return "wikitext"
    if file.suffix == ".jsonl":
        return "c4"
    return "ptb" if file.name.startswith("ptb") else "text"


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # unchanged line ends
    except OSError as error:
        raise AccuracyError(f"no text {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise AccuracyError(f"{file} is not UTF-8 text: give a text file") from error


def _wikitext(content: str) -> str:
    # The data set's loader keeps the line end of non-blank rows.
    lines = content.split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines[:-1] or lines)


def _c4(content: str) -> str:
    return " ".join(_documents(content))


def _documents(content: str) -> Iterator[str]:
    # splitlines would also split at other line separators within a document.
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


def _joined(separator: str, content: str) -> str:
    return separator.join(line.strip() for line in content.splitlines())


_KINDS: dict[str, Callable[[str], str]] = {
    "wikitext": _wikitext,
    "c4": _c4,
    "ptb": partial(_joined, " "),
    DRAWN: _c4,
    "ptb-gptq": partial(_joined, "\n\n"),
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
    except Exception as error:  # network errors have no common class
        raise AccuracyError(
            f"no file {name}, and the hub did not give that data set ({library_reason(error)}): "
            "give a file"
        ) from error
    return "\n\n".join(rows) if name == "wikitext2" else " ".join(rows[:_C4_ROWS])
