"""What is printed for people is whole, however narrow their terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from flexq_bench.commands.output import show_whole


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
