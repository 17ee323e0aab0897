"""Options of the GPU tests: all cases or few that cover them, and a share of them for each GPU."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for _room in ("kernels", "decode", "measure"):  # their helpers `operands`, `decoders`, `cheats`
    sys.path.insert(0, str(HERE.parent / _room))
sys.path.insert(0, str(HERE))

from covering import covering  # noqa: E402  its folder is on the path now


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="all cases of every GPU test")
    parser.addoption("--shard", metavar="I/N", help="every N-th test from the I-th on, I = 1…N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_gpu = [item for item in items if HERE in item.path.parents]
    for item in of_gpu:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    left = set(of_gpu)
    if not config.getoption("--every-case", False):
        left = {item for item in _covering_items(of_gpu) if not item.get_closest_marker("slow")}
    if shard := config.getoption("--shard", None):
        number, count = _shard_of(shard)
        in_order = [item for item in of_gpu if item in left]
        left = set(in_order[number - 1 :: count])
    dropped = set(of_gpu) - left
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _covering_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    of_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
    chosen = []
    for cases in of_test.values():
        if len(cases) == 1:
            chosen += cases
            continue
        parameters = [vars(case)["callspec"].params for case in cases]
        chosen += [cases[index] for index in covering(parameters)]
    return chosen


def _shard_of(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard {text!r} is not I/N with 1 <= I <= N, such as 1/2")
    return int(number), int(count)


@pytest.fixture
def choose(request: pytest.FixtureRequest) -> Callable[[Sequence[object]], Sequence[object]]:
    """choose(values): all of them with --every-case, else few that cover their options.

    values: configurations, or tuples, whose places are options.
    """

    def chosen(values: Sequence[object]) -> Sequence[object]:
        if request.config.getoption("--every-case"):
            return values
        cases = [
            {str(place): part for place, part in enumerate(value)}
            if isinstance(value, tuple)
            else {"value": value}
            for value in values
        ]
        return [values[index] for index in covering(cases)]

    return chosen


class _FailuresAtOnce:
    """Print each failure as it happens, because a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash else ""
            terminal.write_line(f"\nFAILED {report.nodeid}: {message[:200]}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FailuresAtOnce(config))
