"""`flexq-bench demo`: the dashboard on a database of real nights that comes with the package."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import flexq_bench
from flexq_bench.cli.dashboard import PortOption, show
from flexq_bench.cli.options import JsonFlag
from flexq_bench.errors import InfrastructureError

_FILE = Path("dashboard") / "demo.sqlite.xz"


def demo(
    port: PortOption = 8501,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the dashboard on stored nights, alerts, gates and checkpoints, until Ctrl-C.

    They were measured on a CPU and on NVIDIA H200 and H100 GPUs. The database is a temporary copy,
    which may be changed; yours is not.
    """
    with demo_database() as path:
        show(str(path), port=port, open_browser=open_browser, as_json=as_json)


@contextmanager
def demo_database() -> Iterator[Path]:
    """Unpack the database of the package to a temporary folder, with tables of this version."""
    from flexq_bench.db.engine import open_database, upgrade

    packed = Path(flexq_bench.__file__).parent / _FILE
    if not packed.is_file():
        raise InfrastructureError("the demo's database is not installed: install flexq-bench again")
    with tempfile.TemporaryDirectory(prefix="flexq-bench-demo-") as folder:
        path = Path(folder) / "demo.sqlite"
        with lzma.open(packed) as stored, path.open("wb") as unpacked:
            shutil.copyfileobj(stored, unpacked)
        with open_database(str(path), check_schema=False) as database:
            upgrade(database)
        yield path
