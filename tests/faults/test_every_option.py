"""2,000 command lines with something wrong in each: one line and the exit code of wrong usage."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.cli.app import main
from tests.faults.conftest import ROOT, path_with_ours
from tests.faults.inputs import FREE, inputs, is_flag, verbs

INPUTS = int(os.environ.get("FAULT_INPUTS", "2000"))
LONGEST_S = int(os.environ.get("FAULT_LONGEST_S", "10"))  # more on a machine that is busy
PROGRESS = re.compile(r": not a step done yet in \d+ s$")
REFUSED = {2, 3, 4, 5}
TINY = ROOT / "examples" / "models" / "tiny-llama"


class Program:
    """The command line in a process that is kept; replaced when it dies."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("one_input_after_another.py")),
                 str(LONGEST_S)],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            return {"code": process.wait(), "ended": "the process died", "err": "", "took_s": 0.0}
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        if self._process is not None:
            with self._process:  # closes its pipes
                self._process.kill()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tree)], check=True)
    database = tmp_path / "stored.sqlite"
    shape = ("--m", "1", "--n", "32", "--k", "32", "--kernels", "cublas-fp16")
    assert main(("sweep", *shape, "--db", str(database), "--out", str(tree / "results.jsonl"))) == 0
    (tree / "series.csv").write_text("1\n2\n")
    own = {
        "HOME": str(tmp_path / "home"),
        "FLEXQ_BENCH_DB": str(database),
        "FLEXQ_BENCH_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": path_with_ours(),
        "HF_HUB_OFFLINE": "1",
    }
    (tmp_path / "home").mkdir()
    running = Program(tree, os.environ | own)
    yield running
    running.close()
    shutil.rmtree(tree)


def complaint(result: dict[str, Any]) -> str:
    """Return the problem of how an input ended; empty: none."""
    err = result["err"]
    if result["ended"]:
        return str(result["ended"])
    if "unexpected" in err or "Traceback" in err:
        return f"a defect: {err}"
    if result["code"] not in REFUSED:
        return f"exit code {result['code']}: {err}{result.get('out', '')[-300:]}"
    if result["arguments"][0] == "doctor" and result["code"] == 5:
        return ""  # a table of what is wrong is its answer
    # On a machine that is given more than ten seconds an input, progress may be reported first.
    lines = [line for line in err.splitlines() if not PROGRESS.search(line)]
    if len(lines) != 1:
        return f"{len(lines)} lines: {err}"
    return ""


@pytest.mark.timeout(3600)
def test_invalid_input_is_refused_in_one_line(program, tmp_path, seed):
    places = {"TINY": str(TINY), "DB": str(tmp_path / "stored.sqlite")}
    wrong = []
    for arguments in inputs(INPUTS, seed, places):
        result = program.run(arguments) | {"arguments": arguments}
        if said := complaint(result):
            wrong.append(f"{arguments}\n    {said.strip()}")

    assert not wrong, f"{len(wrong)} of {INPUTS} inputs:\n" + "\n".join(wrong)


def test_every_verb_and_every_option_is_among_the_inputs(seed):
    tried = list(inputs(12_000, seed, {}))

    for verb in verbs():
        own = [line for line in tried if line[: len(verb.words)] == verb.words]
        for parameter in verb.parameters:
            option = parameter.opts[0]
            if option.startswith("--") and option not in FREE and not is_flag(parameter):
                assert any(option in line for line in own), (verb.words, option)
