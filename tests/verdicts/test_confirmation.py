"""Verdicts on interleaved blocks: independence, clocks, and too few data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import (
    Cause,
    Comparison,
    Verdict,
    attribute,
    confirm,
    confirm_together,
)
from flexq_bench.verdicts.confirmation import judged_blocks


def blocks(
    shift: float, *, placements: int = 10, per: int = 2, offset: float = 0.003, seed: int = 4
) -> Comparison:
    """Blocks of a head slower by `shift` (ln); offset: sigma of what sets placements apart."""
    rng = np.random.default_rng(seed)
    placement = np.repeat(np.arange(placements), per)
    apart = offset * rng.standard_normal(placements)[placement]
    scatter = 0.001 * rng.standard_normal((2, placement.size))
    base = 100 * np.exp(scatter[0])
    return Comparison(base, 100 * np.exp(shift + apart + scatter[1]), placement)


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [(0.03, Verdict.SLOWER), (-0.03, Verdict.FASTER), (0.0, Verdict.SAME), (0.004, Verdict.SAME)],
)
def test_the_verdict_follows_the_change(shift, verdict):
    found = confirm(blocks(shift))

    assert found.verdict is verdict
    assert found.low < found.log_ratio < found.high
    assert found.cause is (Cause.CODE if verdict is not Verdict.SAME else Cause.NONE)


@pytest.mark.parametrize(
    ("shift", "placements", "is_clear"),
    [(0.1, 7, True), (-0.1, 7, True), (0.1, 12, True), (0.013, 7, False), (0.0, 7, False)],
)
def test_clear_change_has_no_overlap_and_wide_bounds(shift, placements, is_clear):
    found = confirm(blocks(shift, placements=placements))

    assert found.is_clear is is_clear
    assert found.stopped_early is (is_clear and placements < 12)
    assert ("clear after 7 pairs" in found.reason) is found.stopped_early


@pytest.mark.parametrize(
    ("cpu_wait", "verdict"),
    [(0.0, Verdict.SLOWER), (0.04, Verdict.SLOWER), (0.2, Verdict.AMBIGUOUS)],
)
def test_unclear_change_beside_busy_processes_is_ambiguous(cpu_wait, verdict):
    unclear = replace(blocks(0.015, placements=12, offset=0.01), cpu_wait=cpu_wait)
    clear = replace(blocks(0.1, placements=12), cpu_wait=cpu_wait)

    assert (confirm(unclear).verdict, confirm(unclear).is_clear) == (verdict, False)
    assert confirm(clear).verdict is Verdict.SLOWER


def test_change_on_cpus_needs_a_smaller_p_value():
    unclear = blocks(0.015, placements=12, offset=0.01)
    on_gpu, on_cpu = (confirm(replace(unclear, cpu_wait=wait)) for wait in (0.0, 0.01))
    rate = 3 * on_gpu.p_value

    (of_gpu,) = confirm_together([on_gpu], rate=rate)
    (of_cpu,) = confirm_together([on_cpu], rate=rate)

    assert (of_gpu.verdict, of_cpu.verdict) == (Verdict.SLOWER, Verdict.AMBIGUOUS)
    assert of_cpu.p_value == pytest.approx(10 * of_gpu.p_value)


def test_overlapping_sides_are_not_clear():
    comparison = blocks(0.03, placements=7, offset=0.001)
    drift = np.exp(0.01 * np.asarray(comparison.placement))
    both = replace(
        comparison,
        base_us=np.asarray(comparison.base_us) * drift,
        head_us=np.asarray(comparison.head_us) * drift,
    )

    assert confirm(comparison).is_clear
    assert (confirm(both).verdict, confirm(both).is_clear) == (Verdict.SLOWER, False)


def test_bounds_have_their_coverage_with_different_placements():
    bounds = [confirm(blocks(0.0, per=20, offset=0.005, seed=seed)) for seed in range(1000)]

    too_high = sum(confirmation.low > 0 for confirmation in bounds)

    # Taking the 200 blocks for independent would make it about 300.
    assert 1 <= too_high <= 22


def test_contradicting_placements_are_ambiguous():
    found = confirm(blocks(0.015, placements=5, offset=0.03))

    assert found.verdict is Verdict.AMBIGUOUS
    assert found.cause is Cause.NONE


def test_change_below_the_noise_floor_does_not_count():
    comparison = blocks(0.03, offset=0.001)

    assert confirm(replace(comparison, noise_floor=0.04)).verdict is Verdict.SAME
    assert confirm(replace(comparison, noise_floor=0.02)).verdict is Verdict.SLOWER


@pytest.mark.parametrize(("placements", "per"), [(4, 5), (5, 1), (9, 1), (0, 0)])
def test_too_few_blocks_or_placements_are_no_data(placements, per):
    found = confirm(blocks(0.05, placements=placements, per=per))

    assert found.verdict is Verdict.NO_DATA
    assert "are needed" in found.reason


def at_clocks(comparison: Comparison, apart: float, blocks: slice = slice(None)) -> Comparison:
    """Head at an SM clock lower by `apart` (ln) in these blocks, and slower by as much."""
    base_mhz = np.full(np.size(comparison.base_us), 1900.0)
    lower = np.zeros(base_mhz.size)
    lower[blocks] = apart
    return replace(
        comparison,
        head_us=np.asarray(comparison.head_us) * np.exp(lower),
        base_mhz=base_mhz,
        head_mhz=base_mhz * np.exp(-lower),
    )


def test_blocks_at_unequal_clocks_are_left_out():
    throttled = at_clocks(blocks(0.0, placements=6), 0.1, slice(2))

    found = confirm(throttled)

    assert (found.blocks, found.placements) == (10, 5)
    assert found.verdict is Verdict.SAME
    assert judged_blocks(throttled).left_out == 2


@pytest.mark.parametrize(
    ("change", "apart", "verdict"),
    [
        (0.0, 0.02, Verdict.AMBIGUOUS),
        (0.0, -0.05, Verdict.AMBIGUOUS),
        (0.005, 0.05, Verdict.AMBIGUOUS),
        (0.56, 0.03, Verdict.SLOWER),
        (0.04, 0.02, Verdict.SLOWER),
        (-0.56, -0.03, Verdict.FASTER),
        # At a higher clock the slow-down that shows is less than that of the code.
        (0.56, -0.03, Verdict.SLOWER),
    ],
)
def test_change_beyond_the_clocks_counts(change, apart, verdict):
    found = confirm(at_clocks(blocks(change, offset=0.001), apart))

    assert found.verdict is verdict
    assert f"differ by {np.expm1(abs(apart)):.1%}" in found.reason
    assert found.low < change < found.high
    assert found.limited_by_clocks is (verdict is Verdict.AMBIGUOUS)


def test_more_placements_are_requested_only_if_they_help():
    rules = InterleaveRules()
    scattered = confirm(at_clocks(blocks(0.03, placements=5, offset=0.03), 0.015))
    explained = confirm(at_clocks(blocks(0.0), 0.02))
    sometimes = confirm(at_clocks(blocks(0.0, placements=5), 0.02, slice(8)))

    assert {scattered.verdict, explained.verdict, sometimes.verdict} == {Verdict.AMBIGUOUS}
    assert "can explain the change" in explained.reason
    assert "more placements are needed" in scattered.reason
    assert rules.is_decided(explained)
    assert not rules.is_decided(scattered)
    assert not rules.is_decided(sometimes)


def test_clocks_cause_hardly_any_false_verdict():
    """Not more often than the bounds say: 1 of 100 on each side."""
    alarms = sum(
        confirm(at_clocks(blocks(0.0, offset=0.01, seed=seed), 0.02)).verdict is Verdict.SLOWER
        for seed in range(500)
    )

    assert alarms <= 10


def test_non_positive_times_are_left_out():
    comparison = blocks(0.0, placements=10)
    head = np.asarray(comparison.head_us).copy()
    head[[0, 5]] = [np.nan, 0.0]

    found = confirm(replace(comparison, head_us=head))

    assert (found.blocks, found.verdict) == (18, Verdict.SAME)


def test_wrong_result_has_no_speed():
    assert confirm(replace(blocks(-0.5), correct=False)).verdict is Verdict.INCORRECT


def test_equal_machine_code_is_no_code_regression():
    found = confirm(replace(blocks(0.05), same_binary=True))

    assert (found.verdict, found.cause) == (Verdict.SLOWER, Cause.ENVIRONMENT)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"offset": 0.1}, Verdict.SAME),
        ({"placements": 2}, Verdict.SAME),
        ({"shift": 0.05}, Verdict.SLOWER),
    ],
)
def test_same_code_is_the_same_unless_it_measures_differently(changes, verdict):
    measured = blocks(**{"shift": 0.0, **changes})

    assert confirm(replace(measured, same_code=True)).verdict is verdict
    assert confirm(replace(measured, same_code=True, correct=False)).verdict is Verdict.INCORRECT


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="one value a block"):
        confirm(Comparison([1.0, 2.0], [1.0], [0, 0]))


def test_many_comparisons_need_smaller_p_values():
    weak = next(
        found
        for seed in range(200)
        if (found := confirm(blocks(0.012, offset=0.01, seed=seed))).verdict is Verdict.SLOWER
        and found.p_value > 0.004
    )
    quiet = [confirm(blocks(0.0, seed=seed)) for seed in range(50)]
    strong = confirm(blocks(0.05))

    night = confirm_together([weak, *quiet, strong])

    assert confirm_together([weak])[0].verdict is Verdict.SLOWER
    assert night[0].verdict is Verdict.AMBIGUOUS
    assert "among 52" in night[0].reason
    assert night[-1].verdict is Verdict.SLOWER


def test_night_without_data_is_unchanged():
    nothing = confirm(blocks(0.0, placements=2))

    assert confirm_together([nothing]) == (nothing,)
    assert confirm_together([]) == ()


@pytest.mark.parametrize(
    ("kernel", "floor", "baseline", "cause"),
    [
        (0.05, 0.0, 0.001, Cause.CODE),
        (0.05, 0.05, 0.048, Cause.ENVIRONMENT),
        (-0.05, -0.05, -0.05, Cause.ENVIRONMENT),
        (0.10, 0.05, 0.05, Cause.BOTH),
        (0.05, 0.05, 0.0, Cause.UNCLEAR),
        (0.05, 0.05, -0.05, Cause.UNCLEAR),
        (0.05, None, None, Cause.UNCLEAR),
        (0.05, 0.05, None, Cause.ENVIRONMENT),
        (0.005, 0.05, 0.05, Cause.NONE),
    ],
)
def test_anchors_distinguish_code_and_machine(kernel, floor, baseline, cause):
    assert attribute(kernel, floor=floor, baseline=baseline) is cause
