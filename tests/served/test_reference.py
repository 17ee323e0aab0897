"""Our evaluation of a checkpoint, next to engines that serve it or another one."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.tasks import run_task
from flexq_bench.ci.gate_served import ServedRequest, load_served_policy, run_served_gate
from flexq_bench.db.engine import open_database
from flexq_bench.measure.device import find_device
from flexq_bench.served.client import Client
from flexq_bench.served.engines import engine, started
from flexq_bench.served.questions import Asking
from flexq_bench.served.task_suites import TaskSuite

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
STARTS = ("def main(", "import os", "class Foo:", "return the", "for i in", "The value of")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def served(scheme: str, name: str):
    command = f"-m flexq_bench serve-model {TINY} --device cpu --scheme {scheme} --port {{port}}"
    return engine(name, f"{shlex.quote(sys.executable)} {command} --no-tune")


@pytest.mark.parametrize(("head", "code"), [("fp16", "pass"), ("flexq-w6ax", "fail")])
def test_divergence_from_a_checkpoint_judges_head(tmp_path, head, code):
    rows = [{"prompt": f"{start} {i}", "answer": "x"} for start in STARTS for i in range(5)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'version = 1\n[[accuracy]]\nsuite = "texts.jsonl"\n'
        f'checker = "exact"\nmax_tokens = 12\n[kl]\nmean = 0.001\nreference = "{TINY}"\n'
    )
    request = ServedRequest(served("fp16", "base"), served(head, "head"))

    with open_database(str(tmp_path / "results.sqlite")) as database:
        report = run_served_gate(load_served_policy(str(policy)), request, database)

    limit = next(one for one in report.judged if one.check == "KL of texts")
    assert str(limit.outcome) == code
    assert limit.base is not None
    assert limit.base < 0.0005


@pytest.mark.parametrize("kind", ["choice", "generate"])
def test_scores_of_an_engine_equal_those_of_lm_eval(tmp_path, kind):
    rows = [
        {"text": f"{start} x{i}", "choices": ["self", " def main", "None of", "0"], "gold": i % 4}
        for start in STARTS
        for i in range(4)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {
        "choice": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{gold}}"\n'
        "metric_list: [{metric: acc_norm, aggregation: mean, higher_is_better: true}]\n",
        "generate": 'output_type: generate_until\ndoc_to_target: "(e)"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\n'
        "filter_list:\n  - name: first\n    filter:\n"
        "      - {function: regex, regex_pattern: '(e)'}\n      - {function: take_first}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true,"
        " ignore_punctuation: true}]\n",
    }[kind]
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}},"
        f' cache_dir: {tmp_path}/cache}}\ntest_split: test\ndoc_to_text: "{{{{text}}}}"\n{asked}'
    )
    suite = TaskSuite(str(file))

    async def ask(url: str, model: str):
        async with Client(url, model) as client:
            return await suite.ask(client, range(suite.count), Asking(), lambda: None)

    with started(served("fp16", "base")) as running:
        scored = asyncio.run(ask(running.url, running.model))

    model = load_model(str(TINY), device=find_device("cpu"))
    expected = run_task(model, str(file)).metrics[0].items
    assert 0 < sum(expected) < len(expected)
    equal = sum(one.score == item for one, item in zip(scored, expected, strict=True))
    assert equal >= len(expected) - 1  # an FP16 near-tie
