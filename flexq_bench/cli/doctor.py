"""`flexq-bench doctor`: checks of this machine, with advice on missing parts."""

from __future__ import annotations

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, print_wrapped
from flexq_bench.exit_codes import ExitCode

_STYLE = {"ok": "green", "missing": "yellow", "broken": "bold red"}


def doctor(db: DbOption = None, as_json: JsonFlag = False) -> None:
    """Check Python, torch, the GPU stack, Ray, the database and the git tree.

    Exit code 0, also if something optional is missing; 5 if something required is broken.
    """
    from flexq_bench.cli.machine_checks import examine

    checks = examine(db)
    broken = any(check.state == "broken" for check in checks)
    if as_json:
        print_json(checks)
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("what", "state", "found"):
            table.add_column(name, overflow="fold")
        for check in checks:
            advice = f"\n-> {check.advice}" if check.advice else ""
            state = Text(check.state, style=_STYLE[check.state])
            table.add_row(check.name, state, check.detail + advice)
        print_wrapped(console(), table)
    if broken:
        raise typer.Exit(int(ExitCode.INFRASTRUCTURE))
