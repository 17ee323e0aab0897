from __future__ import annotations

import hashlib
import json
import random
import sys
from types import SimpleNamespace

import pytest

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.texts import drawn_windows, read_text, tokenize


@pytest.fixture
def a_file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode())
        return str(path)

    return write


def test_wikitext_rows_are_joined_by_two_newlines(a_file):
    text = read_text(a_file("wiki.test.raw", " \n = A = \n \n B b . \n"))
    assert text.content == "\n\n = A = \n\n\n\n\n B b . \n"
    assert (text.name, text.kind) == ("wikitext", "wikitext")


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "one"}, {"text": "two"}],
        [{"prefix": "o", "gold_completion": "ne"}, {"text": "two", "url": ""}],
    ],
)
def test_documents_are_joined_by_spaces(a_file, rows):
    path = a_file("some.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read_text(path).content == "one two"


def test_documents_may_contain_line_separators(a_file):
    path = a_file("some.jsonl", '{"text": "one\u2028two\x85three"}\n\n{"text": "four"}\n')
    assert read_text(path).content == "one\u2028two\x85three four"


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("", "ptb.test.txt", "no it was n't"),
        ("ptb:", "lines.txt", "no it was n't"),
        ("ptb-gptq:", "ptb.valid.txt", "no it was\n\nn't"),
    ],
)
def test_kind_of_text_says_how_lines_are_joined(a_file, kind, name, content):
    assert read_text(kind + a_file(name, " no it was \n n't \n")).content == content


def test_c4_gptq_draws_windows_like_gptqs_code(a_file):
    """random.seed(0), then 256 times a document, until one is long enough, and a place in it."""
    rows = [{"text": " ".join(str(100 * i + j) for j in range(5 * i))} for i in range(9)]
    text = read_text("c4-gptq:" + a_file("c4.jsonl", "\n".join(map(json.dumps, rows))))
    documents = [[int(word) for word in row["text"].split()] for row in rows]
    drawn, expected, length = random.Random(0), [], 7
    while len(expected) < 256:
        document = documents[drawn.randint(0, 8)]
        if len(document) > length:
            start = drawn.randint(0, len(document) - length - 1)
            expected.append(document[start : start + length])

    windows = list(
        drawn_windows(text, lambda document: [int(word) for word in document.split()], length)
    )

    assert windows == expected
    with pytest.raises(AccuracyError, match="has more than 40 tokens: give a shorter --context"):
        next(drawn_windows(text, lambda document: [int(word) for word in document.split()], 40))
    with pytest.raises(AccuracyError, match="for `accuracy` alone"):
        tokenize(text, None)


def test_other_files_are_unchanged(a_file):
    path = a_file("story.txt", "once\r\nupon ")
    text = read_text(path)
    assert (text.name, text.content) == ("story", "once\r\nupon ")
    assert text.content_hash == hashlib.sha256(b"once\r\nupon ").hexdigest()


def test_kind_and_name_can_be_given(a_file):
    text = read_text("mine=ptb:" + a_file("lines.txt", "a"))
    assert (text.name, text.kind) == ("mine", "ptb")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.txt", "no text nowhere.txt: No such file"),
        ("wiki:some.txt", "no kind of text 'wiki': there are wikitext"),
    ],
)
def test_missing_model_is_named(spec, message):
    with pytest.raises(AccuracyError, match=message):
        read_text(spec)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", " \n", "holds no text"),
        ("bad.jsonl", '{"text": "a"}\n{"title": "b"}\n', "line 2 is no document"),
        ("deep.jsonl", "[" * 100_000, "line 1 is no document"),
        ("number.jsonl", '{"text": 5}\n', "line 1 is no document"),
        ("cut.jsonl", '{"text": "a"}\n{"te', "line 2 is no document"),
    ],
)
def test_a_file_without_text_is_refused(a_file, name, content, message):
    with pytest.raises(AccuracyError, match=message):
        read_text(a_file(name, content))


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AccuracyError, match="not UTF-8 text"):
        read_text(str(path))


def test_data_set_of_the_hub_is_loaded_by_name(monkeypatch):
    requests = []

    def load_dataset(**where):
        requests.append(where)
        return {"text": [" = A = \n", "", " b \n"]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    text = read_text("wikitext2")
    assert text.content == " = A = \n\n\n\n\n b \n"
    assert requests[0]["path"] == "Salesforce/wikitext"


def test_unreachable_hub_is_reported_in_one_line(monkeypatch):
    def load_dataset(**where):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(AccuracyError, match=r"the hub did not give that data set \(no route\)"):
        read_text("c4")
