"""What is printed for people is whole, however narrow their terminal."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console
from rich.table import Table

from flexq_bench.commands.output import print_json, show_whole


def test_what_is_printed_as_json_is_json(capsys):
    print_json({"nan": math.nan, "list": [math.inf, -math.inf, 1.5], "text": "µ"})

    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"nan": None, "list": [None, None, 1.5], "text": "µ"}


def test_no_number_is_cut_on_a_narrow_terminal():
    out = Console(file=io.StringIO(), width=40)
    table = Table("kernel")
    for name in ("median µs", "low", "high", "M", "N", "K"):
        table.add_column(name, no_wrap=True)
    numbers = ("123.456", "122.999", "124.001", "1024", "28672", "11008")
    table.add_row("flexq-w6a6[-evict-first]", *numbers)

    show_whole(out, table)

    shown = out.file.getvalue()
    assert all(number in shown for number in numbers)
    assert "…" not in shown
    assert out.width == 40
