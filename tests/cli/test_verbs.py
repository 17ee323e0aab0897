"""The table of verbs, and what short commands import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from flexq_bench.cli.app import app
from flexq_bench.cli.gates import app as gates

HEAVY = ("torch", "alembic", "scipy", "streamlit", "ray")


@pytest.mark.parametrize("group", [app, gates])
def test_summary_of_each_verb_begins_its_help(group):
    commands = typer.main.get_command(group)
    context = commands.make_context("flexq-bench", ["x"], resilient_parsing=True)
    commands._lists = True
    summaries = {n: commands.get_command(context, n).help for n in commands.list_commands(context)}
    commands._lists = False

    for name, summary in summaries.items():
        text = " ".join(commands.get_command(context, name).help.split("\n\n")[0].split())
        assert text == summary, name


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], (*HEAVY, "flexq_bench.db.tables", "numpy")),
        pytest.param(
            *(["list", "models"], (*HEAVY, "flexq_bench.db.tables", "numpy")),
            marks=pytest.mark.slow,
        ),
        pytest.param(["list", "runs"], HEAVY, marks=pytest.mark.slow),
        (["status"], HEAVY),
    ],
)
def test_short_commands_import_nothing_heavy(tmp_path, arguments, absent):
    script = (
        "import sys; from flexq_bench.cli.app import main; code = main(sys.argv[1:]); "
        f"print([name for name in {absent} if name in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    database = [] if arguments == ["--help"] else ["--db", str(tmp_path / "new.sqlite")]
    if arguments == ["list", "models"]:
        database = []
    elif database:
        from flexq_bench.db.engine import open_database

        open_database(database[1]).close()

    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments, *database], capture_output=True, text=True
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.strip() == "[]"
