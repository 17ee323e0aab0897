"""Detection of launches that take longer on new activations."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from flexq_bench.measure.prepared import Placed


class Launches:
    """A rotation and its buffers: on new activations launches take `slow` times as long, in the
    first so many of all draws."""

    launches = 1

    def __init__(self, slow, draws):
        self._slow, self._left, self._is_new = slow, draws, False

    def repeated_us(self, launches):
        return 100.0 * (self._slow if self._is_new and self._left > 0 else 1.0)

    def poison(self):
        pass

    def sample(self, count):
        pass

    def inspect(self, config, tolerance):
        return ""

    @contextmanager
    def unseen_inputs(self):
        yield self

    def draw(self, draw):
        self._is_new = draw == "new"
        self._left -= self._is_new

    def draw_known(self, launches):
        pass

    def wrong(self, tolerance):
        return ""


@pytest.mark.parametrize(("draws", "is_found"), [(10_000, True), (10, False)])
def test_launches_are_remembered_only_if_all_looks_agree(draws, is_found):
    rotation = Launches(slow=2.0, draws=draws)
    clock = SimpleNamespace(synchronize=lambda: None)

    said = Placed(rotation, rotation, None, clock, 1e-3).inspect()

    assert ("results are remembered" in said) is is_found
