"""Kinds of text that an accuracy gate judges without any file of the user.

| stratum | text |
| --- | --- |
| general | English prose: documentation |
| code | Python |
| maths | worked arithmetic and algebra, generated with a fixed seed |
| language | German, French, Ukrainian and Korean prose |
| chat | conversations, rendered by the tokenizer's chat template |
| long | all of the files and maths, in segments of the evaluation's whole context |
| rare | segments of all other texts with the tokens that their samples have not or seldom |

The files lie in flexq_bench/accuracy/shipped_texts, with their licences. Segments have SHORT tokens
(long: the context), so that a small text has enough of them for a test.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.texts import DOCUMENT_END, Text, read_text
from flexq_bench.workloads.names import unknown

SHORT = 128  # tokens of a segment
RARE, LONG, CHAT = "rare", "long", "chat"
STRATA = ("general", "code", "maths", "language", CHAT, LONG, RARE)
_IN_FILES = ("general", "code", "language")
_SEGMENTS = 240  # evaluated of a text, unless a planned test needs more
_PROBLEMS, _CONVERSATIONS = 900, 400
_SEPARATOR = "\n\n\n"
_SHIPPED = "shipped:"


def shipped_text(name: str, others: Sequence[Text] = ()) -> Text:
    """Return a stratum by name. others: the texts that `rare` is made of.

    Raises KeyError for a name that is not in STRATA.
    """
    if name not in STRATA:
        raise KeyError(name)
    if name == RARE:
        hashed = _hash("".join(text.content_hash for text in others))
        return Text(RARE, RARE, "", hashed, context=SHORT, parts=tuple(others))
    documents = _documents(name)
    context = None if name == LONG else SHORT
    kind = CHAT if name == CHAT else "text"
    content = DOCUMENT_END.join(documents) if name == CHAT else _SEPARATOR.join(documents)
    starts, offset = [], 0
    for document in documents:
        starts.append(offset)
        offset += len(document) + len(_SEPARATOR)
    text = Text(name, kind, content, _hash(content), context=context, starts=tuple(starts))
    return replace(text, segments=_SEGMENTS)


def as_text(spec: str) -> Text:
    """Return a stratum that ships by `shipped:NAME`, or a text as read_text.

    Raises AccuracyError as read_text, or for an unknown name.
    """
    if not spec.startswith(_SHIPPED):
        return read_text(spec)
    name = spec.removeprefix(_SHIPPED)
    alone = [stratum for stratum in STRATA if stratum != RARE]
    if name not in alone:
        raise AccuracyError(unknown("shipped text", name, alone))
    return shipped_text(name)


def sampled_texts(names: Sequence[str], given: Sequence[Text], *, seed: int) -> tuple[Text, ...]:
    """Return texts to judge as samples: the given ones, and strata among `names` that ship."""
    known = {text.name for text in given}
    shipped = [shipped_text(n) for n in names if n in STRATA and n not in known and n != RARE]
    texts = [replace(text, seed=seed) for text in (*given, *shipped)]
    if RARE in names and RARE not in known:
        parts = [text for text in texts if text.name != LONG]  # which is made of the same files
        texts.append(replace(shipped_text(RARE, parts), seed=seed))
    return tuple(texts)


@cache
def _documents(name: str) -> tuple[str, ...]:
    if name == LONG:
        return tuple(text for part in (*_IN_FILES, "maths") for text in _documents(part))
    if name == "maths":
        return tuple(_worked_problems())
    if name == CHAT:
        return tuple(_conversations())
    content = files(__package__).joinpath("shipped_texts", f"{name}.txt").read_text("utf-8")
    return tuple(part.strip("\n") for part in content.split(DOCUMENT_END))


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class _Numbers:
    """Random numbers that are the same under every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # documented to stay the same

    def between(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def one_of(self, choices: Sequence[str]) -> str:
        return choices[self.between(0, len(choices) - 1)]


def _worked_problems() -> Iterator[str]:
    numbers = _Numbers(0)
    kinds = (_sum, _product, _linear, _quadratic, _fractions, _derivative, _story, _powers)
    for index in range(_PROBLEMS):
        yield kinds[index % len(kinds)](numbers)


def _sum(numbers: _Numbers) -> str:
    a, b = numbers.between(120, 98_000), numbers.between(120, 98_000)
    lines, carry = [f"Add {a} and {b}, digit by digit from the right."], 0
    for place, (x, y) in enumerate(_digits(a, b)):
        total = x + y + carry
        carried = f" and the carry {carry}" if carry else ""
        lines.append(f"Place {place + 1}: {x} + {y}{carried} gives {total}, write {total % 10}.")
        carry = total // 10
    return "\n".join((*lines, f"Therefore {a} + {b} = {a + b}."))


def _digits(a: int, b: int) -> Iterator[tuple[int, int]]:
    while a or b:
        yield a % 10, b % 10
        a, b = a // 10, b // 10


def _product(numbers: _Numbers) -> str:
    a, b = numbers.between(12, 999), numbers.between(12, 99)
    tens, ones = b // 10 * 10, b % 10
    return (
        f"What is {a} · {b}?\nSplit {b} = {tens} + {ones}.\n{a} · {tens} = {a * tens}\n"
        f"{a} · {ones} = {a * ones}\n{a * tens} + {a * ones} = {a * b}\nSo {a} · {b} = {a * b}."
    )


def _linear(numbers: _Numbers) -> str:
    x, a, b = numbers.between(-30, 30), numbers.between(2, 19), numbers.between(-60, 60)
    right = a * x + b
    return (
        f"Solve {a}x {b:+d} = {right} for x.\nSubtract {b} on both sides: {a}x = {right - b}.\n"
        f"Divide by {a}: x = {x}.\nCheck: {a} · ({x}) {b:+d} = {right}."
    )


def _quadratic(numbers: _Numbers) -> str:
    p, q = numbers.between(-12, 12), numbers.between(-12, 12)
    total, product = -(p + q), p * q
    return (
        f"Find the roots of x^2 {total:+d}x {product:+d}.\nThe discriminant is ({total})^2 - 4 · "
        f"({product}) = {total**2 - 4 * product}, whose square root is {abs(p - q)}.\n"
        f"Hence x = ({-total} ± {abs(p - q)}) / 2, that is x = {max(p, q)} or x = {min(p, q)}, and "
        f"the polynomial factors as (x {-p:+d})(x {-q:+d})."
    )


def _fractions(numbers: _Numbers) -> str:
    a, b, c, d = (numbers.between(1, 20) for _ in range(4))
    b, d = b + 1, d + 1
    return (
        f"Compute \\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}.\nThe common denominator is {b} · "
        f"{d} = {b * d}.\n{a} · {d} = {a * d} and {c} · {b} = {c * b}, so the sum is "
        f"\\frac{{{a * d + c * b}}}{{{b * d}}} ≈ {(a * d + c * b) / (b * d):.4f}."
    )


def _derivative(numbers: _Numbers) -> str:
    a, b, c, n = (numbers.between(2, 9) for _ in range(4))
    at = numbers.between(1, 5)
    slope = a * n * at ** (n - 1) + 2 * b * at - c
    return (
        f"Let f(x) = {a}x^{n} + {b}x^2 - {c}x. Differentiate term by term: f'(x) = "
        f"{a * n}x^{n - 1} + {2 * b}x - {c}. At x = {at} the slope is {slope}."
    )


def _story(numbers: _Numbers) -> str:
    who = numbers.one_of(("Amina", "Jonas", "Mei", "Rafael", "Olga", "Kofi"))
    what = numbers.one_of(("notebooks", "apples", "tickets", "screws", "stamps"))
    count, price, paid = numbers.between(3, 40), numbers.between(2, 25), 1000
    cost = count * price
    return (
        f"{who} buys {count} {what} for {price} cents each and pays with {paid} cents. How much "
        f"change is there?\nThe {what} cost {count} · {price} = {cost} cents. {paid} - {cost} = "
        f"{paid - cost}. {who} gets {paid - cost} cents back."
    )


def _powers(numbers: _Numbers) -> str:
    base, count = numbers.between(2, 7), numbers.between(4, 8)
    terms = [base**power for power in range(count)]
    total = sum(terms)
    return (
        f"Sum the geometric series 1 + {base} + … + {base}^{count - 1}.\nThe terms are "
        f"{', '.join(map(str, terms))}.\nBy the formula ({base}^{count} - 1) / ({base} - 1) = "
        f"{base**count - 1} / {base - 1} = {total}."
    )


_REQUESTS = (
    "What does this part of the manual mean?",
    "Please continue this section.",
    "I found the following note. What should I know beyond it?",
    "Summarize the text below, then add what follows from it.",
)
_SYSTEMS = ("You are a helpful assistant.", "Answer briefly and precisely.")


def _conversations() -> Iterator[str]:
    """Return conversations, each a JSON list of messages."""
    numbers, problems = _Numbers(1), _documents("maths")
    prose = [p for text in _documents("general") for p in text.split("\n\n") if len(p) > 120]
    for index in range(_CONVERSATIONS):
        messages = [("system", _SYSTEMS[index % 2])] if index % 3 == 0 else []
        for _ in range(numbers.between(1, 2)):
            if numbers.between(0, 1):
                asked, _, answer = problems[numbers.between(0, len(problems) - 1)].partition("\n")
            else:
                place = numbers.between(0, len(prose) - 2)
                asked = f"{numbers.one_of(_REQUESTS)}\n\n{prose[place]}"
                answer = prose[place + 1]
            messages += [("user", asked), ("assistant", answer or "That is all.")]
        yield json.dumps([{"role": role, "content": text} for role, text in messages])


def rendered(text: Text, apply_template: Callable[..., str]) -> Iterator[str]:
    """Render the conversations of the chat stratum. apply_template: the tokenizer's method."""
    for conversation in text.content.split(DOCUMENT_END):
        yield apply_template(json.loads(conversation), tokenize=False)
