"""`flexq-bench gate`: may this change go in? Each gate decides by rules; the exit code says it."""

from __future__ import annotations

import typer

from flexq_bench.cli import gate_static

app = typer.Typer(no_args_is_help=True, help="Decide by rules whether a change may go in.")
app.command("static")(gate_static.static)
