"""What the choice without tuning loses, from the tables and from times that are taken again."""

from __future__ import annotations

import importlib
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.cuda.weight_only.gemm import WeightOnlyConfig

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"
CONFIGS = [WeightOnlyConfig(tiles, 8, 2, 1, 0, 1) for tiles in range(1, 9)]


class Timed:
    """A case whose candidates take 10, 11, ... µs; a single time of the last is a lucky 5 µs."""

    def __init__(self):
        self.us: dict[Config, float] = dict(zip(CONFIGS, map(float, range(10, 18)), strict=True))
        self.again: list[Config] = []

    def time_candidates(self):
        return (self.us | {CONFIGS[-1]: 5.0}).items()

    def time_in_turn(self, configs, rounds):
        self.again = [*configs]
        return [[self.us[config] for config in configs] for _ in range(rounds)]


@pytest.fixture(scope="module")
def untuned_loss():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("untuned_loss")


def losses_of(untuned_loss, every):
    """By kernel, group and largest number of tokens."""
    return {
        (kernel, *of): losses
        for kernel in untuned_loss.OF_TABLES
        for of, losses in untuned_loss.left_out(kernel, every).items()
    }


@pytest.mark.slow
def test_shapes_that_were_not_timed_lose_little(untuned_loss):
    """The cost model alone loses 2 to 5 % in the mean for many tokens."""
    lost = losses_of(untuned_loss, every=9)

    assert len(lost) == 69
    assert statistics.mean(map(statistics.mean, lost.values())) < 0.013


@pytest.mark.slow
def test_no_number_of_tokens_loses_much_at_untimed_shapes(untuned_loss):
    lost = losses_of(untuned_loss, every=1)
    means = {key: statistics.mean(losses) for key, losses in lost.items()}
    worst = {key: untuned_loss.expected_worst(losses) for key, losses in lost.items()}

    assert max(means.values()) < 0.03, means
    assert max(worst.values()) < 0.2, worst
    assert statistics.mean(means.values()) < 0.0095


@pytest.mark.slow
def test_report_has_a_line_per_number_of_tokens(untuned_loss):
    _, _, *lines = untuned_loss.report_rows(["w4a16"])
    tables = untuned_loss.own_configs("w4a16")[1].tables

    assert [line.split(" | ")[:3] for line in lines] == [
        ["| w4a16", str(group), str(len(table.cases))] for group, table in tables.items()
    ]


def test_the_expected_worst_is_the_mean_over_all_subsets(untuned_loss):
    assert untuned_loss.expected_worst([0.4, 0.0, 0.1], drawn=2) == pytest.approx(0.9 / 3)
    assert untuned_loss.expected_worst([0.4, 0.0, 0.1], drawn=5) == 0.4
    losses = [0.001 * i * i for i in range(30)]
    by_size = [untuned_loss.expected_worst(losses, drawn) for drawn in range(1, 31)]
    assert by_size[0] == pytest.approx(statistics.mean(losses))
    assert all(fewer < more for fewer, more in pairwise(by_size))


@pytest.mark.parametrize(
    ("choice", "loss", "again"),
    [
        (1, 0.1, [1, 7, 0, 2, 3]),  # the last has a lucky time
        (6, 0.6, [6, 7, 0, 1, 2, 3]),  # a slow choice is timed again, too
    ],
)
def test_choice_and_fastest_are_timed_again(untuned_loss, choice, loss, again):
    timed = Timed()

    found, times = untuned_loss.loss_again(timed, lambda configs: configs[choice])

    assert found == pytest.approx(loss)
    assert times == timed.us
    assert timed.again == [CONFIGS[index] for index in again]
