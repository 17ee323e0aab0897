"""Stored verdicts as they were decided, and recomputed from their evidence."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.identity import fingerprint
from flexq_bench.db.queries.verdicts import Decision, DecisionEvidence
from flexq_bench.measure.ab.rules import InterleaveRules
from flexq_bench.verdicts import Comparison, Evidence, alert_rule, judge_evidence, judge_together
from flexq_bench.verdicts.evidence_plot import Panel, terminal_plot, write_png
from flexq_bench.verdicts.recompute import explain_alert

ODD = Comparison(
    base_us=(1 / 3, math.nan, math.inf, 0.1),
    head_us=(0.1 + 0.2, 5e-324, 1.0, -math.inf),
    placement=(0, 0, 1, 1),
    base_mhz=(1980.0, math.nan, 1980.0, 1980.0),
    noise_floor=1e-9,
)


def test_evidence_is_unchanged_by_json():
    evidence = Evidence("case", ODD, beside=(0.1, 2e-300), floor=-0.0, detail="why")

    back = Evidence.from_dict(json.loads(json.dumps(evidence.as_dict(), allow_nan=False)))

    assert repr(back) == repr(evidence)


def test_recomputed_verdicts_agree(session, record, compared):
    night = record(
        compared("flexq-w6a6", 1.05),
        compared("flexq-w6a8", 1.02, noise=0.004),
        compared("flexq-w6a6", correct=False, shape=(2, 256, 256)),
        compared("read-6"),
        compared("cublaslt-w8a8"),
    )

    found = explain_alert(session, night.opened[0])

    assert len(found) >= 2
    assert [(entry.problem, entry.again.differences) for entry in found] == [("", ())] * len(found)


def test_other_comparisons_of_the_night_are_evidence(compared):
    candidate = compared("flexq-w6a6", 1.014, noise=0.009)
    quiet = [compared("cublas-fp16", shape=(m, 256, 256)) for m in range(1, 40)]

    alone, *_ = judge_together([candidate], noise_floors=[0.0], weight_bits=[6])
    beside, *_ = judge_together([candidate, *quiet], noise_floors=[0.0] * 40, weight_bits=[6] * 40)

    assert alone.confirmation.verdict == "slower"
    assert beside.confirmation.verdict == "ambiguous"
    assert "among 40 comparisons" in judge_evidence(beside.evidence).reason


def test_canaries_are_judged_separately(compared):
    candidate = compared("flexq-w6a6", 1.014, noise=0.009)
    canaries = [compared("cublas-fp16", shape=(m, 256, 256), head=1) for m in range(1, 40)]

    found, *_ = judge_together(
        [candidate, *canaries], noise_floors=[0.0] * 40, weight_bits=[6] * 40
    )

    assert found.confirmation.verdict == "slower"


def test_change_below_a_known_noise_floor_is_same(compared):
    (found,) = judge_together([compared("flexq-w6a6", 1.05)], noise_floors=[0.1], weight_bits=[6])

    assert found.confirmation.verdict == "same"
    assert found.evidence.comparison.noise_floor == 0.1


def test_looks_share_the_false_discovery_rate():
    assert InterleaveRules().rate == alert_rule.RATE_OF_ONE_LOOK


def stored(session, alert):
    (row,) = queries.alert_decisions(session, alert)
    return session.query(Decision).filter_by(uuid=row.uuid).one()


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "same"},
        {"log_ratio": 0.04879016416943200},
        {"cause": "both"},
        {"reason": "other words"},
        {"detector_version": 99},
        {"parameters": {"confidence": 0.5}},
        {"rule": "none"},
        {"numbers": {"p_value": 0.5}},
        {"input_hash": "0" * 64},
    ],
)
def test_change_of_stored_verdict_is_detected(session, record, compared, change):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    row = stored(session, alert)
    for name, value in change.items():
        setattr(row, name, value)
    session.flush()

    (found,) = explain_alert(session, alert)

    assert "the hash differs" in found.problem


def test_change_of_the_last_bit_is_detected(session, record, compared):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    row = stored(session, alert)
    row.log_ratio = math.nextafter(row.log_ratio, 1)
    session.flush()

    (found,) = explain_alert(session, alert)

    assert "not what was decided" in found.problem
    assert [text.partition(" ")[0] for text in found.again.differences] == ["log_ratio"]


def rewrite(session, row, flat):
    """Store other evidence with a decision."""
    session.get(DecisionEvidence, row.id).data = zlib.compress(json.dumps(flat).encode())
    session.flush()


def evidence_of(session, row):
    return json.loads(zlib.decompress(session.get(DecisionEvidence, row.id).data))


def test_changed_evidence_is_detected_by_its_hash(session, record, compared):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    row = stored(session, alert)
    rewrite(session, row, evidence_of(session, row) | {"head_binary": "forged"})

    (found,) = explain_alert(session, alert)

    assert "evidence is not what was judged" in found.problem


def as_earlier_version(session, row, *, without=()):
    """Make a decision one of an earlier version, which knew less."""
    flat = evidence_of(session, row)
    for name in without:
        del flat["comparison"][name]
    row.detector_version, row.parameters = 3, {"confidence": 0.95, "old_limit": 2}
    row.rule, row.numbers, row.decided_hash = "", None, None
    row.verdict, row.log_ratio, row.reason = "slower", 0.25, "old words"
    row.input_hash = fingerprint(flat)
    rewrite(session, row, flat)


@pytest.mark.parametrize("without", [(), ("base_correct", "same_binary"), ("base_us",)])
def test_verdict_of_earlier_version_is_shown_as_decided(session, record, compared, without):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    as_earlier_version(session, stored(session, alert), without=without)

    (found,) = explain_alert(session, alert)

    assert found.problem == ""
    assert (found.decision.reason, found.conclusion.log_ratio) == ("old words", 0.25)
    assert found.raw["comparison"]["head_us"]
    is_readable = "base_us" not in without
    assert (found.evidence is not None, found.again is not None) == (is_readable, is_readable)
    if is_readable:
        assert found.again.verdict == "slower"
        assert any("log_ratio was 0.25" in text for text in found.again.differences)


def test_evidence_of_newer_version_is_read(session, record, compared):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    row = stored(session, alert)
    flat = evidence_of(session, row) | {"new_anchor": 0.1}
    row.input_hash, row.decided_hash = fingerprint(flat), None
    rewrite(session, row, flat)

    (found,) = explain_alert(session, alert)

    assert (found.problem, found.again.differences) == ("", ())


def test_missing_evidence_is_reported(session, record, compared):
    (alert,) = record(compared("flexq-w6a6", 1.05)).opened
    session.delete(session.get(DecisionEvidence, stored(session, alert).id))
    session.flush()

    (found,) = explain_alert(session, alert)

    assert (found.problem, found.raw) == ("its evidence is gone", None)


@pytest.fixture
def panel(compared):
    (found,) = judge_together([compared("flexq-w6a6", 1.05)], noise_floors=[0.0], weight_bits=[6])
    return Panel("flexq-w6a6", found.evidence.comparison, found.confirmation)


def test_terminal_plot_shows_every_placement(panel):
    head, *rows, estimate = (line.plain for line in terminal_plot(panel))

    assert len(rows) == 6
    assert "%" in head
    for row in (*rows, estimate):
        assert row.index("◆") > row.index("│")
    assert "+5.0" in estimate


def test_empty_comparison_is_reported(panel):
    empty = replace(panel, comparison=Comparison((), (), ()))

    assert [line.plain for line in terminal_plot(empty)] == ["no block that may be compared"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_png_has_a_panel_per_verdict(tmp_path, panel, count):
    from PIL import Image

    write_png(tmp_path / "out.png", [panel] * count)

    with Image.open(tmp_path / "out.png") as image:
        assert image.format == "PNG"
        assert image.height == pytest.approx(264 * max(count, 1), abs=2)
