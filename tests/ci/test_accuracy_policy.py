from __future__ import annotations

import pytest

from flexq_bench.ci.accuracy_gate.checks.task import TaskLimit
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.workloads.errors import WorkloadError

HEAD = 'version = 1\nschemes = ["flexq-w6ax"]\n'
TEXT = '[[perplexity]]\ntext = "wikitext"\npercent = 2\n'


@pytest.fixture
def policy(tmp_path):
    def load(text: str):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return load_accuracy_policy(str(path))

    return load


def test_omitted_keys_have_defaults(policy):
    found = policy(HEAD + TEXT)
    assert (found.name, found.schemes, found.base) == ("mine", ("flexq-w6ax",), "fp16")
    assert (found.context, found.max_tokens, found.limit, found.allow_not_judged) == (
        *(None, None, None, ()),
    )
    (limit,) = (limit.table for limit in found.limits)
    assert (limit.text, limit.increase, limit.percent, limit.upper_percent) == (
        *("wikitext", None, 2.0, None),
    )


def test_bundled_policy_is_found_by_name():
    found = load_accuracy_policy("default")
    assert [task.name for task in found.of(TaskLimit)] == ["piqa", "arc_easy"]


def test_task_file_is_relative_to_the_policy(policy, tmp_path):
    task = '[[task]]\nname = "mine.yaml"\nmetric = "acc"\nmargin_points = 1\n'
    assert policy(HEAD + task).of(TaskLimit)[0].name == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schemes = ["w6a6"]\n' + TEXT, "version is missing"),
        (HEAD.replace("1", "2", 1) + TEXT, "version is 2, this flexq-bench reads 1"),
        (HEAD + "limits = 5\n" + TEXT, "no key 'limits' here: the keys are limit"),
        (HEAD + TEXT + "percnt = 1\n", "perplexity 1: no key 'percnt' here: the keys are percent"),
        (HEAD + '[[perplexity]]\ntext = "a"\n', "perplexity 1: limits nothing"),
        (HEAD, "limits nothing: add"),
        (
            HEAD + '[parity]\nkernels = ["flexq"]\ntolerance = 0.01\n',
            "parity. is of no text or task",
        ),
        (HEAD + TEXT.replace("2", "-2"), "percent must be a number of at least 0"),
        (HEAD + '[[task]]\nname = "piqa"\nmetric = "acc"\n', "task 1: margin_points is missing"),
        (HEAD + TEXT + "[parity]\nkernels = []\ntolerance = 0.1\n", "kernels must be a list"),
        (HEAD + "parity = 1\n" + TEXT, r"parity must be a table, under \[parity\]"),
        ("version = 1\n" + TEXT, "schemes is missing"),
    ],
)
def test_malformed_policy_is_refused_with_its_key(policy, text, message):
    with pytest.raises(WorkloadError, match=message):
        policy(text)


def test_unknown_policy_name_lists_the_bundled_ones():
    with pytest.raises(WorkloadError, match=r"no policy 'nightly': there is default; or give"):
        load_accuracy_policy("nightly")


def test_zero_quantile_limit_needs_its_tokens(policy):
    found = policy(HEAD + '[kl]\ntext = "wikitext"\np95 = 0.1\np999 = 0\n')
    assert found.tokens_needed() == {"wikitext": 1000}
