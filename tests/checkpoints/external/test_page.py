"""The page on others' checkpoints names the kernels that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.kernel_choice import kernel_label

PAGE = Path(__file__).parents[3] / "docs" / "external-checkpoints.md"
ROWS = re.findall(
    r"^\| ((?:u?int|fp)\d/[^|]+) \| (\S+) \| (\S+) \|", PAGE.read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize(("weights", "activations", "kernel"), ROWS)
def test_each_row_names_the_kernel_that_runs_it(weights, activations, kernel):
    for weight in re.findall(r"u?int\d/\w+|fp\d/\w+", weights):
        chosen = kernel_label(NumberFormat.parse(weight), NumberFormat.parse(activations))
        assert (chosen or "none") == kernel


def test_the_page_has_rows():
    assert len(ROWS) == 13
