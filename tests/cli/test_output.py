"""Tables and JSON on narrow terminals and pipes."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console
from rich.table import Table

from flexq_bench.cli.output import (
    console,
    print_json,
    print_unbroken,
    print_wrapped,
    printable,
    say,
)
from flexq_bench.measure import worker_messages


def test_printed_json_has_no_nan(capsys):
    print_json({"nan": math.nan, "list": [math.inf, -math.inf, 1.5], "text": "µ"})

    parsed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert parsed == {"nan": None, "list": [None, None, 1.5], "text": "µ"}


def test_narrow_terminal_cuts_no_number():
    out = Console(file=io.StringIO(), width=40)
    table = Table("kernel")
    for name in ("time µs", "low", "high", "M", "N", "K"):
        table.add_column(name, no_wrap=True)
    numbers = ("123.456", "122.999", "124.001", "1024", "28672", "11008")
    table.add_row("flexq-w6a6[-evict-first]", *numbers)

    print_unbroken(out, table)

    shown = out.file.getvalue()
    assert all(number in shown for number in numbers)
    assert "…" not in shown
    assert out.width == 40


def test_names_between_colons_are_no_emoji(capsys):
    say(console(), "gemm:m:100: [bold]x")

    assert capsys.readouterr().out == "gemm:m:100: [bold]x\n"


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_narrow_terminal_breaks_no_word(width):
    out = Console(file=io.StringIO(), width=width)
    table = Table("kernel", "created (UTC)", "summary")
    rows = (
        ("flexq-w6a6[+warp-reduction]", "2026-11-21 22:40:04", "FlexQ W6A6 on binary tensor cores"),
        ("flexq-w6a8", "2026-11-22 22:40:04", "rounded to nearest, groups of 128 for weights"),
    )
    for row in rows:
        table.add_row(*row)

    print_wrapped(out, table)

    shown = out.file.getvalue()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    words = {word.strip(";") for word in shown.split()}
    assert {word for row in rows for cell in row for word in cell.split()} <= words


def test_control_characters_are_escaped(capsys):
    say(console(), "host\x1b[2J\x9b31m\u202e name µ ×")

    printed = capsys.readouterr().out
    assert printed == "host\\x1b[2J\\x9b31m\\u202e name µ ×\n"


def test_printed_json_controls_no_terminal(capsys):
    print_json({"µ": "a\x9b31m\u202eb"})

    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"µ": "a\x9b31m\u202eb"}


def test_cells_are_shown_as_they_are_without_control_characters(capsys):
    table = Table("m = 1:100:x2", "[b]")
    table.add_row("host\x1b[2J", ":x:")
    print_unbroken(console(), table)

    printed = capsys.readouterr().out
    for text in ("m = 1:100:x2", "[b]", "host\\x1b[2J", ":x:"):
        assert text in printed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::add-mask::failed", "\\x3a:add-mask::failed"),
        ("head: bad\n  ::error::x", "head: bad\n  \\x3a:error::x"),
        ("a ##[set-output name=a]b", "a \\x23#[set-output name=a]b"),
        ("a ##vso[task.setvariable]b", "a \\x23#vso[task.setvariable]b"),
        ("std::vector, ## and a[0]", "std::vector, ## and a[0]"),
    ],
)
def test_commands_to_who_reads_a_log_are_escaped(text, shown):
    assert printable(text) == shown
    assert worker_messages.printable(text) == shown.replace("\n", " ")
