"""Records to export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BUILDERS = Path(__file__).parents[2] / "db" / "builders.py"


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The builders of the database's tests: build.a_record(m=8), build.a_run()."""
    spec = importlib.util.spec_from_file_location("builders_of_records", BUILDERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
