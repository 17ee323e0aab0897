"""Faults, seeded: FAULT_SEED is the first round's seed, FAULT_ROUNDS how many there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def seed() -> int:
    return int(os.environ.get("FAULT_SEED", "0"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)
