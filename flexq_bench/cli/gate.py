"""`flexq-bench gate`: rules that decide whether a change may be merged, by exit code."""

from __future__ import annotations

import typer

from flexq_bench.cli import gate_static

app = typer.Typer(no_args_is_help=True, help="Decide by rules whether a change may be merged.")
app.command("static")(gate_static.static)
