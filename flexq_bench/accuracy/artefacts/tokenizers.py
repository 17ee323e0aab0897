"""Comparison of a tokenizer with the original's, by what it returns.

Both read and write the same texts: samples of several scripts, every token of the vocabulary in
random order, every special token with its surroundings, and seeded random texts of Unicode.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.artefacts.differences import Difference, changed, shown

_SAMPLES = (
    "",
    " ",
    "The quick brown fox jumps over the lazy dog. It's 3.14 o'clock , isn't it ?",
    "  leading and trailing  \n\n\t tabs\r\nand lines\n",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\nfor i in range(10):\n\tprint(f(i))\n",
    '{"key": [1, 2.5e-3, null], "ключ": "значение"} <html>&amp;</html> http://a.b/c?d=e#f',
    "Grüße aus Köln: naïve café, Ærøskøbing, İstanbul, ﬁne ﬂow, ① ２ ³ ½",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم ١٢٣",
    "你好，世界！ こんにちは世界。 안녕하세요 세계 สวัสดีชาวโลก नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 \u00a0\u200b\u2028\ufeff \x00\x01\x7f \ufffd",
    "1234567890 12,345.67 0x1F 000001 999999999999999999",
    "a" * 300,
    "=" * 70 + "-" * 70 + " " * 70 + "\n" * 12,
)
# Ranges of random characters, each as likely as another: ASCII, Latin, Greek and Cyrillic, Hebrew
# and Arabic, Indic, punctuation, CJK, Hangul, emoji, all others.
_RANGES = (
    (0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0xA0, 0x24F), (0x370, 0x4FF), (0x590, 0x6FF),
    (0x900, 0xDFF), (0x2000, 0x206F), (0x3040, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
    (0x00, 0xD7FF), (0xE000, 0x10FFFF),
)  # fmt: skip
_RANDOM_TEXTS, _LONGEST_RANDOM = 300, 60
_TOKENS_TOGETHER = 24  # of the vocabulary, in one text
_MAX_SPECIAL = 300
_MAX_CONFLICTS = 2000
_TOKENIZER = "tokenizer.json"
# Vocabularies that programs read in place of tokenizer.json.
_OTHER_FILES = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_NAMES = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")


def tokenizer_differences(
    ours: Any,
    theirs: Any,
    texts: Sequence[str] = (),
    *,
    positions: int | None = None,
    seed: int = 0,
) -> Iterator[Difference]:
    """The differences between two tokenizers of transformers.

    texts: more to read and write. positions: of the original model; a longer `model_max_length` is
    none. seed: of random texts.
    """
    yield from _vocabulary(ours, theirs)
    yield from _special_tokens(ours, theirs)
    merges = list(_merges(ours, theirs))
    yield from merges
    corpus = [*_SAMPLES, *texts, *_special_texts(theirs), *_vocabulary_texts(theirs, seed)]
    corpus += [*_random_texts(seed), *(_conflicts(ours, theirs) if merges else ())]
    own, other = _encoded(ours, corpus), _encoded(theirs, corpus)
    yield from _encoding(own, other, [*corpus, *_SAMPLES])
    yield from _decoding(ours, theirs, other, seed)
    most = positions or 10**9
    own_length, other_length = (min(t.model_max_length, most) for t in (ours, theirs))
    if own_length < other_length:  # it would cut texts
        yield changed("tokenizer.model_max_length", own_length, other_length)
    for side in ("padding_side", "truncation_side"):
        sides = [getattr(tokenizer, side, None) for tokenizer in (ours, theirs)]
        if sides[0] != sides[1]:
            yield changed(f"tokenizer.{side}", *sides)


def vocabulary_differences(ours: Path, theirs: Path, tokenizer: Any) -> Iterator[Difference]:
    """The differences of a folder's older vocabularies from those of the original's folder.

    tokenizer: the original's, whose content tools write as vocab.json and merges.txt.
    """
    for name in _OTHER_FILES if ours.is_dir() and theirs.is_dir() else ():
        own, other = ours / name, theirs / name
        if own.is_file() and not (
            (other.is_file() and own.read_bytes() == other.read_bytes())
            or _is_written(own, tokenizer)
        ):
            yield Difference(f"files.{name}", "another vocabulary than the original's")


def _is_written(file: Path, tokenizer: Any) -> bool:
    """Return True if a tokenizer has what this vocab.json or merges.txt says."""
    try:
        if file.suffix == ".json":
            return bool(json.loads(file.read_text()).items() <= tokenizer.get_vocab().items())
        lines = [
            line.split(" ") for line in file.read_text().splitlines() if line[:9] != "#version:"
        ]
        return file.suffix == ".txt" and list(map(tuple, lines)) == _stored_merges(tokenizer)
    except (ValueError, TypeError, AttributeError):
        return False


def _vocabulary(ours: Any, theirs: Any) -> Iterator[Difference]:
    own, other = ours.get_vocab(), theirs.get_vocab()
    # A padding token that the original lacks is never produced by text.
    added_pad = ours.pad_token if theirs.pad_token is None else None
    differing = [
        token
        for token in own.keys() | other.keys()
        if own.get(token) != other.get(token) and not (token == added_pad and token not in other)
    ]
    if differing:
        first = min(differing, key=lambda token: other.get(token, own.get(token, 0)))
        yield Difference(
            "tokenizer.vocabulary",
            f"{len(differing)} tokens, the first: {shown(first)} is {own.get(first)}, the "
            f"original's: {other.get(first)}",
        )


def _special_tokens(ours: Any, theirs: Any) -> Iterator[Difference]:
    has_pad = theirs.pad_token is not None
    for name in _NAMES:
        own, other = (_id_of(tokenizer, name) for tokenizer in (ours, theirs))
        if own != other and (name != "pad" or has_pad):
            yield changed(f"tokenizer.{name}_token_id", own, other)
    skipped = {None} if has_pad else {ours.pad_token_id}
    own_ids, other_ids = (set(t.all_special_ids) - skipped for t in (ours, theirs))
    if own_ids != other_ids and not _explained(ours, theirs, own_ids ^ other_ids):
        odd = sorted(own_ids ^ other_ids)
        yield Difference(
            "tokenizer.special_tokens",
            f"{shown(theirs.convert_ids_to_tokens(odd))} are special in one of both",
        )


def _explained(ours: Any, theirs: Any, ids: set[int]) -> bool:
    """Return True if these special tokens differ only because a named one does (bos, eos, …)."""
    named = {_id_of(tokenizer, name) for tokenizer in (ours, theirs) for name in _NAMES}
    return ids <= named


def _id_of(tokenizer: Any, name: str) -> int | None:
    token = getattr(tokenizer, f"{name}_token", None)
    return None if token is None else int(tokenizer.convert_tokens_to_ids(token))


def _merges(ours: Any, theirs: Any) -> Iterator[Difference]:
    """The difference in the order of merges, if files have them: `tokenizer.json`, GGUF's of BPE.

    Conversions of SentencePiece's order merges of the same rank differently by version.
    """
    own, other = _stored_merges(ours), _stored_merges(theirs)
    if own is None or other is None or own == other:
        return
    rank = next(
        (i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]),
        min(len(own), len(other)),
    )
    yield Difference(
        "tokenizer.merges",
        f"from merge {rank} on ({shown(own[rank : rank + 1])}, the original's: "
        f"{shown(other[rank : rank + 1])}); {len(own)} merges, the original's: {len(other)}",
    )


def _stored_merges(tokenizer: Any) -> list[tuple[str, str]] | None:
    file = Path(str(tokenizer.name_or_path)) / _TOKENIZER
    try:
        stored = file.is_file()
        text = file.read_text("utf-8") if stored else tokenizer.backend_tokenizer.to_str()
        model = json.loads(text)["model"]
        if not stored and model["byte_fallback"]:
            return None
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        return [(str(first), str(second)) for first, second in merges]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _conflicts(ours: Any, theirs: Any) -> Iterator[str]:
    """Texts in which two merges whose order differs want the same token."""
    own, other = _stored_merges(ours) or [], _stored_merges(theirs) or []
    ranks = {merge: rank for rank, merge in enumerate(own)}
    moved = [m for rank, m in enumerate(other) if ranks.get(m) != rank][:_MAX_CONFLICTS]
    by_first: dict[str, list[str]] = {}
    for first, second in moved:
        by_first.setdefault(first, []).append(second)
    for first, second in moved:
        for last in by_first.get(second, ())[:8]:
            yield theirs.convert_tokens_to_string([first, second, last])


def _encoding(
    own: Sequence[list[int]], other: Sequence[list[int]], corpus: Sequence[str]
) -> Iterator[Difference]:
    odd = [index for index, ids in enumerate(own) if ids != other[index]]
    if odd:
        first = min(odd, key=lambda index: len(corpus[index]))
        yield Difference(
            "tokenizer.encode",
            f"{len(odd)} of {len(corpus)} texts, for example {shown(corpus[first])}: "
            f"{shown(_around(own[first], other[first]))}, the original's: "
            f"{shown(_around(other[first], own[first]))}",
        )


def _around(ids: Sequence[int], others: Sequence[int]) -> list[int]:
    """The ids from the first that differs on, at most eight."""
    pairs = enumerate(zip(ids, others, strict=False))
    place = next((i for i, (own, other) in pairs if own != other), min(len(ids), len(others)))
    return list(ids[place : place + 8])


def _encoded(tokenizer: Any, corpus: Sequence[str]) -> list[list[int]]:
    """Ids of each text with special tokens, then those of the samples without."""
    ids: list[list[int]] = tokenizer(list(corpus))["input_ids"]
    ids += tokenizer(list(_SAMPLES), add_special_tokens=False)["input_ids"]
    return ids


def _decoding(
    ours: Any, theirs: Any, encoded: Sequence[list[int]], seed: int
) -> Iterator[Difference]:
    ids = sorted(set(ours.get_vocab().values()) & set(theirs.get_vocab().values()))
    random.Random(seed).shuffle(ids)
    # Nearly all tokens occur again in random order: texts contain few bytes that are no characters.
    sequences = [ids[start : start + 8] for start in range(0, len(ids), 8)]
    sequences += [sequence for sequence in encoded if sequence]
    common = set(ids)
    as_set: dict[str, Any] = {"skip_special_tokens": True}  # each tokenizer cleans up as it is set
    literal = {"clean_up_tokenization_spaces": False}
    for options in (literal | {"skip_special_tokens": False}, literal | as_set, as_set):
        skips = options["skip_special_tokens"]
        own_pad = {ours.pad_token_id} if theirs.pad_token_id is None and skips else set()
        kept = [s for s in sequences if common.issuperset(s) and own_pad.isdisjoint(s)]
        own, other = (tokenizer.batch_decode(kept, **options) for tokenizer in (ours, theirs))
        odd = [index for index, text in enumerate(own) if text != other[index]]
        if odd:
            first = min(odd, key=lambda index: len(kept[index]))
            yield Difference(
                "tokenizer.decode",
                f"{len(odd)} of {len(kept)} sequences, for example {shown(kept[first])}: "
                f"{shown(own[first])}, the original's: {shown(other[first])}",
            )
            return


def _special_texts(tokenizer: Any) -> Iterator[str]:
    for token in [str(added) for added in tokenizer.get_added_vocab()][:_MAX_SPECIAL]:
        yield token
        yield f"a{token}b {token} c  {token}  \n{token}\nd{token}{token}"


def _vocabulary_texts(tokenizer: Any, seed: int) -> Iterator[str]:
    """Texts of all tokens in random order."""
    tokens = sorted(tokenizer.get_vocab())
    random.Random(seed).shuffle(tokens)
    for start in range(0, len(tokens), _TOKENS_TOGETHER):
        yield tokenizer.convert_tokens_to_string(tokens[start : start + _TOKENS_TOGETHER])


def _random_texts(seed: int) -> Iterable[str]:
    generator = random.Random(seed)
    for _ in range(_RANDOM_TEXTS):
        ranges = generator.choices(_RANGES, k=generator.randint(1, 3))
        length = generator.randint(1, _LONGEST_RANDOM)
        yield "".join(chr(generator.randint(*generator.choice(ranges))) for _ in range(length))
