"""Lets the tests of this room import their helpers, and choose configurations for a GPU."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def on_gpu():
    """on_gpu("sm_90"): until the test ends, configurations are chosen for this target's GPU."""
    from flexq_bench.kernels.runtime.gpu import OF_TARGET, chosen_for

    with ExitStack() as described:
        yield lambda target: described.enter_context(chosen_for(OF_TARGET[target]))
