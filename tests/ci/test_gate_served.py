"""The gate of two engines: verdicts, faults, storage and policies."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexq_bench.ci.gate_served import (
    ServedPolicy,
    ServedRequest,
    load_served_policy,
    run_served_gate,
)
from flexq_bench.ci.reports.accuracy import as_json, markdown
from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import AccuracyRecord, GateRecord, Record
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.served.engines import engine
from flexq_bench.served.turns import Places
from flexq_bench.workloads.errors import WorkloadError

_TESTS = Path(__file__).parents[1]
_POWER = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "served_power.py"
_POLICY = """
version = 1
timeout_s = 2.0
[[accuracy]]
suite = "questions.jsonl"
checker = "number"
detect_points = {detect}
max_tokens = 40
chat = {chat}
[faults]
detect_points = 8.0
[kl]
mean = 0.05
"""


@pytest.fixture
def database(tmp_path: Path):
    with open_database(str(tmp_path / "results.sqlite")) as opened:
        yield opened


@pytest.fixture
def policy(tmp_path: Path) -> Callable[..., ServedPolicy]:
    """A policy with one suite of so many questions."""
    server: dict[str, Any] = runpy.run_path(str(_TESTS / "served" / "server.py"))

    def written(
        count: int = 100, detect: float = 10.0, more: str = "", chat: str = "false"
    ) -> ServedPolicy:
        prompts = [f"Question {number}: how many?" for number in range(count)]
        rows = [{"prompt": p, "answer": server["right_answer"](p)} for p in prompts]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "questions.jsonl").write_text(lines)
        path = tmp_path / "policy.toml"
        path.write_text(_POLICY.format(detect=detect, chat=chat) + more)
        return load_served_policy(str(path))

    return written


def _command(options: str) -> str:
    server = _TESTS / "served" / "server.py"
    return f"{shlex.quote(sys.executable)} {server} --port {{port}} {options}"


def _request(head: str, base: str = "", **values: Any) -> ServedRequest:
    return ServedRequest(engine("base", _command(base)), engine("head", _command(head)), **values)


def _stored(database: Database, kind: type) -> list[Any]:
    with database.session() as session:
        return list(queries.stored_records(session, kind, Filters()))


def test_equal_engines_pass_and_are_stored(database: Database, policy: Callable[..., ServedPolicy]):
    report = run_served_gate(policy(), _request(""), database)

    assert report.exit_code == ExitCode.PASS
    assert {str(limit.outcome) for limit in report.judged} == {"pass"}
    (gate,) = _stored(database, GateRecord)
    assert (gate.verdict, gate.exit_code, gate.model) == ("pass", 0, "test-model")
    right = [r for r in _stored(database, AccuracyRecord) if r.metric == "right"]
    assert len({record.scheme for record in right}) == 2
    assert all(len(record.values) == record.n_items > 0 for record in right)
    assert json.loads(as_json(report))["gate"] == "served"
    assert "Served gate passed" in markdown(report)


def test_divergence_of_chats_fails(database: Database, policy: Callable[..., ServedPolicy]):
    head = "--model other --logprob-noise 1.0"
    report = run_served_gate(policy(60, chat="true"), _request(head), database)

    (kl,) = (limit for limit in report.judged if limit.check.startswith("KL of"))
    assert str(kl.outcome) == "fail"
    assert "base serves test-model, head other" in report.warnings


def test_lost_answers_fail(database: Database, policy: Callable[..., ServedPolicy]):
    report = run_served_gate(policy(), _request("--lose-share 0.25"), database)

    assert report.exit_code == ExitCode.REGRESSION
    assert report.judged[0].check == "accuracy of questions"
    assert str(report.judged[0].outcome) == "fail"


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ("--garbage", "malformed answers"),
        ("--logprob-noise 1.0", "KL of"),
        *(
            pytest.param(options, check, marks=pytest.mark.slow)
            for options, check in (
                ("--empty-share 0.3", "empty answers"),
                ("--loop-share 0.3", "looping answers"),
                ("--truncate 6", "cut off answers"),
            )
        ),
    ],
)
def test_faulty_answers_of_head_fail(
    database: Database, policy: Callable[..., ServedPolicy], options: str, check: str
):
    report = run_served_gate(policy(), _request(options), database)

    failed = [limit.check for limit in report.judged if str(limit.outcome) == "fail"]
    assert any(name.startswith(check) for name in failed)
    assert report.exit_code == ExitCode.REGRESSION


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--die-after 30", "head: the engine died with exit code 3"),
        ("--hang-after 25", "timed out"),
        ("--refuse 500", "server error"),
        ("--loading-s 60", "not ready after 2 s"),
        ("--no-such-option", "exit code 2"),
    ],
)
def test_failing_engine_is_not_judged_and_answers_are_stored(
    database: Database, policy: Callable[..., ServedPolicy], options: str, reason: str
):
    places = Places(ready_within_s=2.0)

    report = run_served_gate(policy(), _request(options, places=places), database)

    assert report.exit_code == ExitCode.MISSING
    assert str(report.judged[0].outcome) == "not judged"
    assert reason in report.judged[0].reason
    assert "\n" not in report.judged[0].reason
    stored = {(r.scheme, r.metric): r for r in _stored(database, AccuracyRecord)}
    base = stored[report.base, "right"]
    assert base.n_items >= 20
    assert _stored(database, GateRecord)[0].verdict == "not judged"


@pytest.mark.slow
def test_speed_before_an_engines_end_is_stored(
    database: Database, policy: Callable[..., ServedPolicy]
):
    load = "lengths = 'fixed'\nprompt_tokens = 4\nnew_tokens = 10\nconcurrency = 4\nrequests = 8\n"
    rules = policy(10, 60.0, f"[[speed]]\nname = 'short'\n{load}cooldown_s = 0.0\n")
    head = _request("--tpot-ms 1 --die-after 120", "--tpot-ms 1", places=Places(("0", "1")))

    report = run_served_gate(rules, head, database)

    speed = [limit for limit in report.judged if limit.check.startswith("speed")]
    assert any("head: " in limit.reason and "exit code 3" in limit.reason for limit in speed)
    medians = [r for r in _stored(database, Record) if r.metric == "median_tpot"]
    assert len(medians) == 2
    assert all(record.n_samples for record in medians)


def test_one_question_without_answer_is_not_judged(
    database: Database, policy: Callable[..., ServedPolicy]
):
    report = run_served_gate(policy(), _request("--refuse 500:0.05"), database)

    assert report.exit_code == ExitCode.MISSING
    assert "without an answer" in report.judged[0].reason


def test_ignored_seed_is_reported(database: Database, policy: Callable[..., ServedPolicy]):
    rules = policy(40, 60.0)
    sampled = [table.model_copy(update={"samples": 4, "temperature": 1.0})
               for table in rules.table.accuracy]  # fmt: skip
    table = rules.table.model_copy(update={"accuracy": tuple(sampled)})
    rules = ServedPolicy(rules.name, rules.version, rules.fingerprint, table, rules.folder)

    report = run_served_gate(rules, _request("--spread 0.5 --ignore-seed"), database)

    assert any("ignores the seed" in line for line in report.warnings)
    assert "4 samples each" in report.judged[0].coverage


@pytest.mark.parametrize(
    "more",
    ["[[accuracy]]\nsuite = 'x'\nsamples = 2\ntemperature = 0.0\n", "alpha = 2.0\n", "x = 1"],
)
def test_policy_without_sense_is_refused(tmp_path: Path, more: str):
    path = tmp_path / "policy.toml"
    path.write_text(f"version = 1\n{more}")

    with pytest.raises(WorkloadError, match=r"policy\.toml"):
        load_served_policy(str(path))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ('{"prompt": "x"}', "answer"),
        ('{"prompt": "x", "answer": 1, "checker": "guess"}', "guess"),
        ('{"prompt": [{"role": 1}], "answer": 1}', "messages"),
        ("{", "JSON"),
    ],
)
def test_line_that_is_no_question_is_named(
    database: Database, policy: Callable[..., ServedPolicy], tmp_path: Path, row: str, word: str
):
    rules = policy()
    (tmp_path / "questions.jsonl").write_text(row)

    with pytest.raises(UsageError, match=rf"line 1: .*{word}"):
        run_served_gate(rules, _request(""), database)


def _simulated(kind: str, draws: int, **values: float) -> Counter[str]:
    tool = runpy.run_path(str(_POWER))
    rng = np.random.default_rng(3)
    gates = [
        tool["simulated_gate"](tool[kind](rng, **values), seed=seed)[0] for seed in range(draws)
    ]
    return Counter(map(tool["verdict"], gates))


def test_gate_of_a_release_on_its_page_is_read(tmp_path: Path):
    page = (_TESTS.parent / "docs" / "served-engines.md").read_text()
    block = page.split("```sh\n")[1].split("```")[0]
    written = block.split("<<'END'\n")[1].split("END\n")[0]
    (tmp_path / "release.toml").write_text(written)
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')

    read = load_served_policy(str(tmp_path / "release.toml"))

    assert len(block.splitlines()) <= 15
    (suite,) = read.table.accuracy
    assert (suite.checker, suite.detect_points) == ("number", 3.0)


def test_simulated_gates_of_equal_engines_pass():
    assert _simulated("greedy", 10, lost=0.01, won=0.01) == {"pass": 10}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_300_simulated_gates_of_equal_engines_pass():
    assert _simulated("greedy", 150, lost=0.01, won=0.01) == {"pass": 150}
    assert _simulated("sampled", 150, loss=0.0) == {"pass": 150}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_flips_of_three_points_are_found_in_1000_draws():
    flipped = _simulated("greedy", 1000, lost=0.055, won=0.025)
    equal = _simulated("greedy", 1000, lost=0.04, won=0.04)

    assert flipped["fail"] >= 900
    assert equal["fail"] <= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_gates_of_equal_servers_pass(database: Database, policy: Callable[..., ServedPolicy]):
    rules = policy(300, 5.0)
    for seed in range(10):
        report = run_served_gate(rules, _request("", seed=seed), database)
        assert report.exit_code == ExitCode.PASS
