"""The smoke suite through the command line, with Ray and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexq_bench.cli.app import main
from flexq_bench.db.exchange import read_records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own pipes
def test_smoke_suite_on_a_local_cluster_is_complete(tmp_path: Path):
    database = ("--db", str(tmp_path / "flexq.sqlite"))
    found = []
    for where in ("none", "local"):
        file = tmp_path / f"{where}.jsonl"
        command = ("run", "smoke", "--backend", "cpu", "--cluster", where, "--json", str(file))
        assert main((*command, *database)) == 0
        # Whether a right result is noisy is chance: other programs use this CPU too.
        found.append({r.case: r.status.replace("noisy", "ok") for r in read_records(file)})

    assert found[0] == found[1]
    assert len(found[0]) > 20
