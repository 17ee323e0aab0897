from __future__ import annotations

import pytest

from flexq_bench.workloads import published
from flexq_bench.workloads.errors import WorkloadError


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A function that puts a text in place of the file."""

    def put(text):
        (tmp_path / "workloads").mkdir(exist_ok=True)
        (tmp_path / "workloads" / "published.toml").write_text(text, encoding="utf-8")
        monkeypatch.setattr(published.resources, "files", lambda _: tmp_path)
        published.published_values.cache_clear()
        published.absent_tables.cache_clear()

    yield put
    published.published_values.cache_clear()
    published.absent_tables.cache_clear()


SET = '[[set]]\nsource = "P"\ntable = "T"\nkernel = "k"\nmetric = "speedup"\n'


def test_table_row_has_differing_values_and_number(file):
    file(SET + 'by = ["m", "model"]\nvalues = [[1, "a", 2.0], [4, "b", 3.0]]\n')

    found = published.published_values()

    assert [(v.m, v.model, v.value, v.unit) for v in found] == [
        (1, "a", 2.0, "×"),
        (4, "b", 3.0, "×"),
    ]


@pytest.mark.parametrize(
    "damaged",
    [
        SET + "values = [[1, 2.0]]\n",
        SET + 'bound = "roughly"\nvalues = [[2.0]]\n',
        SET + "no_such_key = 1\nvalues = [[2.0]]\n",
        SET.replace("speedup", "joy") + "values = [[2.0]]\n",
        SET,
    ],
)
def test_a_damaged_file_is_refused(file, damaged):
    file(damaged)

    with pytest.raises(WorkloadError, match=r"published\.toml"):
        published.published_values()


def test_every_reproduced_paper_is_listed_or_declared_absent():
    named = {
        one.source.partition(",")[0]
        for one in (*published.published_values(), *published.absent_tables())
    }

    assert {"FlexQ", "ABQ-LLM", "ZeroQuant(4+2)", "Atom", "DGQ"} <= named
