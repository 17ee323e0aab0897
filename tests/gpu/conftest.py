"""GPU tests are skipped, with the reason, where there is no NVIDIA GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for _room in ("kernels", "decode", "measure"):  # their helpers `operands`, `decoders`, `cheats`
    sys.path.insert(0, str(Path(__file__).parents[1] / _room))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
