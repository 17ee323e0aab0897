"""The benchmark of labelled series: the published format is read, the scorer is TCPDBench's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "verdicts"


@pytest.fixture
def labelled(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import labelled as module

    yield module
    for name in ("labelled", "made_series", "annotated_series", "yardsticks"):
        sys.modules.pop(name, None)


def a_dataset(folder: Path) -> Path:
    """Two series in the format of the Turing Change Point Dataset, of which one has one dimension,
    and a file that is none."""
    flat = {"name": "flat", "n_obs": 4, "n_dim": 1, "time": {"index": [0, 1, 2, 3]}}
    flat["series"] = [{"label": "V1", "type": "float", "raw": [1.5, None, -2, 3]}]
    wide = {**flat, "name": "wide", "n_dim": 2}
    for one in (flat, wide):
        (folder / "datasets" / one["name"]).mkdir(parents=True)
        path = folder / "datasets" / one["name"] / f"{one['name']}.json"
        path.write_text(json.dumps(one), encoding="utf-8")
    (folder / "checksums.json").write_text("{}", encoding="utf-8")
    marks = {"flat": {"6": [2], "7": []}, "wide": {"6": []}}
    (folder / "annotations.json").write_text(json.dumps(marks), encoding="utf-8")
    return folder


def test_series_are_read_with_marks_of_every_annotator(labelled, tmp_path):
    ((name, values, marks),) = labelled.public(a_dataset(tmp_path))

    assert (name, marks) == ("flat", {"6": [2], "7": []})
    np.testing.assert_array_equal(values, [1.5, np.nan, -2, 3])


def test_scores_are_those_of_the_published_definition(labelled):
    # Van den Burg and Williams 2020: the start counts as a change that everybody knows. Found 0, 50
    # and 90: 50 fits the first annotator, so precision is 2 of 3; recall 1 and 1 of 1.
    marks = {"first": [52], "second": []}

    assert labelled.f1(marks, [50, 90]) == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    assert labelled.f1(marks, [59]) == pytest.approx(2 * (1 / 2) * (3 / 4) / (1 / 2 + 3 / 4))
    # One segment of 100 over two halves covers each by a half; two halves cover one by a half.
    assert labelled.covering({"one": [50]}, [], 100) == pytest.approx(0.5)
    assert labelled.covering({"one": []}, [50], 100) == pytest.approx(0.5)
    assert labelled.covering({"one": [50]}, [50], 100) == 1


def test_detections_are_indices_of_the_series_with_its_gaps(labelled):
    values = np.array([np.nan, 1.0, np.nan, 2.0, 3.0])

    assert labelled.detections(lambda usable: [1, usable.size - 1], values) == [3, 4]


def test_every_second_series_by_name_is_held_out(labelled):
    names = sorted((*labelled.STEP_LIKE, *labelled.OTHERS))

    assert len(names) == len(set(names)) == 31
    assert sorted(labelled.DEVELOPMENT) == names[::2]


def test_parts_of_a_dataset_are_told_by_name(labelled, tmp_path):
    parts = dict(labelled.public_parts(a_dataset(tmp_path)))

    assert list(parts) == ["further ones"]
    assert [group for group, _, _ in parts["further ones"]] == ["held out"]


def test_the_windowed_t_test_returns_local_maxima_of_t(labelled):
    import yardsticks

    level = np.random.default_rng(3).standard_normal(100) + 8 * (np.arange(100) >= 60)

    assert yardsticks.windowed_t(level) == [60]
    assert yardsticks.windowed_t(np.ones(100)) == []
    assert yardsticks.windowed_t(level[:20]) == []


def test_series_stuck_at_one_value_has_its_steps(labelled):
    # Half of its residuals are equal and none of them 0.
    from annotated_series import annotated_series

    values, _ = annotated_series(2340)

    assert 106 in labelled.detections(labelled.DETECTORS["level model"], values)
