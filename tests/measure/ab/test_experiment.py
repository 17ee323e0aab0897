"""Interleaved A/B measurement: order, labels, looks, and broken workers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest

from flexq_bench.errors import BrokenRevisionError, InfrastructureError, UsageError
from flexq_bench.measure.ab import InterleaveRules, confirm_comparisons, course
from flexq_bench.measure.ab.blocks import Block, SampleBatch, measure_blocks
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, trusted_pair
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess
from flexq_bench.verdicts import Cause, Verdict, confirm
from flexq_bench.verdicts.alert_rule import FALSE_DISCOVERY_RATE
from flexq_bench.verdicts.confirmation import CORRECTED
from flexq_bench.workloads.case import Case

CASE = Case.from_key("flexq-w6a6 gemm cold m1n64k64")
OTHER = Case.from_key("flexq-w6a8 gemm cold m1n64k64")
RULES = InterleaveRules(processes=5, blocks=2, looks=1, timeout_s=20.0)
# Pairs of processes differ by tenths of a percent, as on a real GPU.
SCATTER = [0.0, 0.001, -0.001, 0.002, -0.002, 0.0005]
NOISY = {"offsets": [0.02, -0.02, 0.03, -0.03, 0.01, 0, 0.02, -0.01, 0.01, -0.02]}


def only(found):
    (result,) = found.values()
    return result


def measured(requests):
    """Requests that prepare a case to be measured."""
    return [r for r in requests if r["do"] == "prepare" and r["config"] != {}]


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [(100, 103, Verdict.SLOWER), (100, 97, Verdict.FASTER), (100, 100.2, Verdict.SAME)],
)
def test_verdict_follows_the_blocks(compared, base, head, verdict):
    found = only(compared({"us": base, "offsets": SCATTER}, {"us": head}))

    assert found.confirmation.verdict is verdict
    assert found.confirmation.log_ratio == pytest.approx(math.log(head / base), abs=0.002)
    assert confirm(found.comparison) == found.confirmation


def test_each_pair_of_processes_is_a_unit_of_two_blocks(compared):
    found = only(compared())

    assert (found.confirmation.blocks, found.confirmation.placements) == (10, 5)
    assert found.comparison.placement == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert all(type(value) is float for value in found.comparison.base_us)


def test_each_placement_is_a_unit_with_few_processes(compared):
    rules = InterleaveRules(processes=2, placements=3, blocks=2, looks=1)

    assert only(compared(rules=rules)).comparison.placement == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)


def test_turns_are_abba_and_the_first_side_alternates(a_tree, command, requests):
    tree = a_tree("both")
    rules = InterleaveRules(processes=1, placements=5, blocks=2, looks=1)
    experiment = ABExperiment(tree, tree, rules, "cpu", one_process=True, command=command)

    list(compare_cases([(experiment, [(CASE, OTHER)])]))

    turns = [r["slot"][0] for r in requests("both") if r["do"] == "turn"]
    assert "".join(turns[:16]) == "bhhb" + "hbbh" + "hbbh" + "bhhb"


def test_two_kernels_share_weights(a_tree, command, requests):
    tree = a_tree("both")
    rules = InterleaveRules(processes=1, placements=5, blocks=2, looks=1)
    experiment = ABExperiment(tree, tree, rules, "cpu", one_process=True, command=command)

    (found,) = compare_cases([(experiment, [(CASE, OTHER)])])

    placed = [(r["slot"], r["beside"]) for r in requests("both") if r["do"] == "place"]
    assert placed[:4] == [("base", None), ("head", "base"), ("head", None), ("base", "head")]
    assert found.case == CASE


def test_both_sides_are_checked_after_each_placement(compared, requests):
    compared(rules=InterleaveRules(processes=1, placements=5, blocks=2, looks=1))

    for side in ("base", "head"):
        asked = [request["do"] for request in requests(side)]
        one_placement = ["place", *["turn"] * 4, "leave"]
        before = ["describe", "memory", "prepare", "release"]
        assert asked == [*before, "describe", "memory", "prepare", *one_placement * 5, "release"]


def test_fresh_processes_keep_the_first_configuration(compared, requests):
    found = only(compared({"config": {"tile": 8}}))

    for side in ("base", "head"):
        prepared = measured(requests(side))
        assert [request["config"] for request in prepared] == [None, *[{"tile": 8}] * 4]
    assert found.base_config == found.head_config == {"tile": 8}


@pytest.mark.parametrize(
    ("sources", "other", "used"),
    [("aa", "aa", {"tile": 8}), ("aa", "bb", None), ("", "", None)],
    ids=["equal", "different", "unknown"],
)
def test_head_uses_configuration_of_base_for_equal_sources(
    compared, requests, sources, other, used
):
    compared({"config": {"tile": 8}, "kernels": sources}, {"kernels": other})

    first = measured(requests("head"))[0]
    assert first["config"] == used


def test_head_prefers_the_choice_of_base(compared, requests):
    compared({"config": {"tile": 8}}, {"config": {"tile": 16}})

    first = measured(requests("head"))[0]
    assert first["favourite"] == {"tile": 8}


@pytest.mark.parametrize(
    ("base", "head", "cause"),
    [("aa", "aa", Cause.ENVIRONMENT), ("aa", "bb", Cause.CODE), (None, None, Cause.CODE)],
)
def test_difference_of_equal_machine_code_has_cause_environment(compared, base, head, cause):
    found = only(compared({"binary": base}, {"binary": head, "us": 110}))

    assert found.confirmation.cause is cause
    assert (found.base_binary, found.head_binary) == (base, head)


@pytest.mark.parametrize(("us", "verdict"), [(115, Verdict.AMBIGUOUS), (130, Verdict.SLOWER)])
def test_different_clocks_explain_at_most_their_ratio(compared, us, verdict):
    found = only(compared({"mhz": 1980}, {"mhz": 1700, "us": us}))

    assert found.confirmation.verdict is verdict
    assert "differ by 16.5%" in found.confirmation.reason


def test_turns_at_a_low_clock_do_not_count(compared):
    found = only(compared({}, {"valid": False}))

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert all(math.isnan(value) for value in found.comparison.head_us)


@pytest.mark.parametrize("when", ["wrong", "wrong_after"])
def test_wrong_result_has_no_speed(compared, when):
    found = only(compared({}, {when: "not bit-exact", "us": 50}))

    assert found.confirmation.verdict is Verdict.INCORRECT
    assert found.detail == "head: not bit-exact"


@pytest.mark.parametrize("when", ["wrong", "wrong_after"])
def test_head_that_corrects_base_is_not_timed(compared, when):
    found = only(compared({when: "not bit-exact"}, {"us": 500}))

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert found.detail == f"{CORRECTED}; base: not bit-exact"
    assert not found.comparison.base_correct
    assert len(found.comparison.head_us) == 10  # its results are checked as many times as ever


@pytest.mark.parametrize(
    ("alone", "is_slowed"),
    [
        ([100], False),
        ([90], None),
        ([90, 100], False),
        ([90] * 7, None),
        ([90] * 8, True),
        ([96] * 8, False),
    ],
    ids=["equal", "unknown", "two speeds", "by chance", "slowed", "a little"],
)
def test_base_is_slowed_if_it_is_always_faster_alone(alone, is_slowed):
    pair = trusted_pair(CASE, CASE)
    batch = SampleBatch((100.0,), None, True)
    pair.blocks = [Block(process, 0, (batch, batch), (batch, batch)) for process in range(5)]
    pair.alone_us = alone

    assert pair.is_slowed is is_slowed


def test_base_slowed_by_head_is_not_believed(a_tree, command):
    """Head is as slow as base beside it."""
    base = a_tree("base", offsets=[0.1] * RULES.processes + [0.0] * 16)
    head = a_tree("head", us=100 * math.exp(0.1))
    experiment = ABExperiment(base, head, RULES, "cpu", command=command, controls_base=True)

    (found,) = compare_cases([(experiment, [(CASE, CASE)])])

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert "faster by more than 5% where nothing of head runs" in found.detail


def test_slower_case_needs_no_run_of_base_alone(a_tree, command):
    base, head = a_tree("base"), a_tree("head", us=110)
    experiment = ABExperiment(base, head, RULES, "cpu", command=command, controls_base=True)

    (found,) = compare_cases([(experiment, [(CASE, CASE)])])

    assert found.confirmation.verdict is Verdict.SLOWER
    assert len((base.tree / "starts").read_text()) == RULES.processes


@pytest.mark.parametrize(
    ("base", "head", "reason"),
    [
        ({"error": 0.01}, {"wrong": "off", "error": 0.03}, "base: off; head: off"),
        ({"wrong_starts": 1}, {"wrong": "off"}, "base: off; head: off"),
        ({"wrong_starts": 5}, {}, "base: off; base is right where nothing of head runs"),
    ],
    ids=["less", "only beside head", "only beside a right head"],
)
def test_wrong_base_does_not_excuse_a_wrong_head(compared, base, head, reason):
    found = only(compared({"wrong": "off"} | base, head))

    assert (found.confirmation.verdict, found.detail) == (Verdict.INCORRECT, reason)


@pytest.mark.parametrize("error", [None, 0.01])
def test_head_as_wrong_as_base_is_no_regression(compared, error):
    wrong = {"wrong": "off", "error": error}

    found = only(compared(wrong, wrong, rules=replace(RULES, stops_at_wrong=True)))

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert "both are wrong on the same inputs" in found.detail
    assert found.detail.endswith("base: off; head: off")


def test_case_wrong_on_both_sides_does_not_end_the_comparison(compared):
    wrong = {"wrong_cases": [CASE.key]}

    found = compared(wrong, wrong, cases=[CASE, OTHER], rules=replace(RULES, stops_at_wrong=True))

    assert found[CASE.key].confirmation.verdict is Verdict.NO_DATA
    assert found[OTHER.key].confirmation.verdict is Verdict.SAME


@pytest.mark.parametrize("dead", ["base", "head"])
def test_death_next_to_a_wrong_base_gives_no_data(compared, dead):
    base = {"wrong": "off"} | ({"die_at": "turn"} if dead == "base" else {})

    found = only(compared(base, {"die_at": "turn"} if dead == "head" else {}))

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert found.comparison.base_correct  # not known to be corrected
    assert found.detail.startswith(f"{dead} died")
    assert found.detail.endswith("base: off")


def test_base_is_restarted_alone_for_the_remaining_cases(compared):
    base = {"wrong": "off", "die_at": "prepare", "die_in": 5}  # the first process without head

    found = compared(base, {}, cases=[CASE, OTHER])

    corrected = [not found[case.key].comparison.base_correct for case in (CASE, OTHER)]
    assert corrected == [False, True]
    assert found[CASE.key].detail == "base: off"  # nothing is said of base alone


def test_interrupted_worker_gets_no_request():
    asked = []

    class Hangs:
        def send(self, what, **_arguments):
            asked.append(what)

        def receive(self):
            if asked[-1] == "memory":
                return {"needed": 1, "free": 2}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_blocks(
            trusted_pair(CASE, CASE),
            [(Hangs(), Hangs())],
            0,
            placements=1,
            blocks=1,
            on_block=print,
        )

    assert asked == ["memory", "memory", "prepare"]


def test_wrong_results_are_found_before_anything_is_timed(compared, requests):
    rules = replace(RULES, stops_at_wrong=True)

    found = compared({}, {"wrong_cases": [OTHER.key]}, cases=(OTHER, CASE), rules=rules)

    verdicts = {key: result.confirmation.verdict for key, result in found.items()}
    assert verdicts == {CASE.key: Verdict.AMBIGUOUS, OTHER.key: Verdict.INCORRECT}
    assert found[CASE.key].detail == f"not timed, because {OTHER.key} is wrong"
    assert "turn" not in [r["do"] for r in requests("head")]
    asked = [r["do"] for r in requests("base")]
    assert asked == ["describe", "memory", "prepare", "release"]


def test_other_cases_are_timed_beside_a_wrong_one(compared):
    found = compared({}, {"wrong_cases": [OTHER.key]}, cases=(CASE, OTHER))

    verdicts = {key: result.confirmation.verdict for key, result in found.items()}
    assert verdicts == {CASE.key: Verdict.SAME, OTHER.key: Verdict.INCORRECT}


def test_cases_share_processes_in_an_order_drawn_for_each(compared, requests):
    cases = [replace(CASE, workload=replace(CASE.gemm, m=m)) for m in range(1, 25)]

    compared(cases=cases)

    asked = requests("base")
    assert [r["do"] for r in asked].count("describe") == 6  # the first one's twice
    orders = [r["case"] for r in asked if r["do"] == "prepare"][24:]  # after the checks
    by_process = [orders[start : start + 24] for start in range(0, len(orders), 24)]
    assert all(set(order) == {case.key for case in cases} for order in by_process)
    assert len({tuple(order) for order in by_process}) == 5


def test_end_of_the_budget_leaves_cases_ambiguous(compared):
    rules = replace(RULES, budget_s=1.0)

    found = compared({"slow_s": 0.2}, {}, cases=(CASE, OTHER), rules=rules)

    results = list(found.values())
    assert {result.confirmation.verdict for result in results} == {Verdict.AMBIGUOUS}
    assert all("the budget of 1 s ended after" in result.detail for result in results)
    assert {result.pairs_needed for result in results} == {5}


def test_case_that_a_budget_does_not_allow_is_ambiguous(compared, monkeypatch):
    monkeypatch.setattr(course._Course, "_affordable", lambda _self, pairs, _rounds: pairs[:1])

    found = compared(cases=(CASE, OTHER), rules=replace(RULES, budget_s=60.0))

    verdicts = {key: result.confirmation.verdict for key, result in found.items()}
    assert verdicts == {CASE.key: Verdict.SAME, OTHER.key: Verdict.AMBIGUOUS}


@pytest.mark.slow
def test_ambiguous_case_says_how_many_pairs_it_needs(compared):
    found = only(compared({}, NOISY | {"us": 101}, rules=replace(RULES, looks=3)))

    assert found.confirmation.verdict is Verdict.AMBIGUOUS
    assert 20 < found.pairs_needed < 40


def test_progress_counts_pairs_and_decided_cases(compared):
    states = []

    compared({}, {"offsets": SCATTER}, cases=(CASE, OTHER), on_progress=states.append)

    first, last = states[0], states[-1]
    assert (first.cases, first.decided, first.pair, first.pairs) == (2, 0, 0, 5)
    assert (last.decided, last.pair, last.done, last.expected) == (2, 5, 10, 10)
    assert last.left_s == 0.0
    assert [state.decided for state in states if state.decided] == [1, 2]


def test_case_counts_as_decided_when_it_ends(compared):
    states = []

    # Slower after five pairs, too, where no case ends as slower.
    rules = replace(RULES, processes=6, looks=2)
    compared({}, {"us": 130, "offsets": SCATTER}, rules=rules, on_progress=states.append)

    pairs = [(state.decided, state.done, state.expected) for state in states]
    assert pairs[-1] == (1, 6, 6)
    assert (0, 5, 6) in pairs
    assert all(done == 6 for decided, done, _ in pairs if decided)


@pytest.mark.parametrize(("looks", "placements"), [(1, 5), (3, 20)])
def test_ambiguous_case_gets_looks_that_double_its_blocks(compared, looks, placements):
    rules = InterleaveRules(processes=5, looks=looks)

    found = only(compared({}, NOISY | {"us": 101}, rules=rules))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("ambiguous", placements)


@pytest.mark.parametrize(("enough", "placements"), [(False, 20), (True, 5)])
def test_sufficient_result_gets_no_second_look(compared, enough, placements):
    rules = InterleaveRules(processes=5, suffices=lambda _found, _decided: enough)

    found = only(compared({}, NOISY | {"us": 101}, rules=rules))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("ambiguous", placements)


def test_case_that_all_looks_can_not_decide_ends_before(compared):
    found = only(compared({}, NOISY, rules=InterleaveRules(processes=5)))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("ambiguous", 8)
    assert found.pairs_needed > 20


def test_unchanged_case_gets_no_second_look(compared):
    rules = InterleaveRules(processes=5)

    assert only(compared({}, {"offsets": SCATTER}, rules=rules)).confirmation.placements == 5


@pytest.mark.parametrize(
    ("processes", "placements"), [(6, 12), pytest.param(12, 12, marks=pytest.mark.slow)]
)
def test_slower_on_few_placements_gets_a_second_look(compared, processes, placements):
    rules = InterleaveRules(processes=processes)

    # Its bounds include 1 %, so it is not clear.
    found = only(compared({}, {"us": 101.15, "offsets": SCATTER}, rules=rules))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("slower", placements)
    assert not found.confirmation.stopped_early


def test_time_without_a_cpu_is_part_of_the_evidence(compared, monkeypatch):
    waits = count()
    monkeypatch.setattr(WorkerProcess, "waited_s", lambda _worker: float(next(waits)))

    assert only(compared()).comparison.cpu_wait > 1.0


def test_clear_change_ends_after_six_pairs(compared, requests):
    found = only(compared({}, {"us": 110, "offsets": SCATTER}, rules=InterleaveRules()))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("slower", 6)
    assert found.confirmation.stopped_early
    assert "clear after 6 pairs" in found.confirmation.reason
    assert [request["do"] for request in requests("base")].count("describe") == 7


def test_change_in_few_processes_is_not_clear(compared):
    rules = InterleaveRules.with_processes(2)

    found = only(compared({}, {"us": 110, "offsets": SCATTER}, rules=rules))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("slower", 12)


def test_two_speeds_of_processes_are_not_slower(compared):
    # Five pairs that fall alike, as chance has it, and then others as they usually do.
    two = {"offsets": [0.0] * 5 + [0.05, 0.05, 0.0, 0.05, 0.0, 0.05, 0.0]}
    speeds = {"offsets": [0.05] * 5 + [0.0, 0.0, 0.05, 0.05, 0.0, 0.05, 0.0]}

    found = only(compared(two, speeds, rules=InterleaveRules(looks=2)))

    assert (found.confirmation.verdict, found.confirmation.placements) == ("same", 6)


def test_refused_case_has_no_data_and_a_reason(compared):
    found = only(compared({}, {"refuse": "no kernel 'flexq-w6a6'"}))

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert found.detail == "head: no kernel 'flexq-w6a6'"


def test_two_sides_that_exceed_the_memory_are_refused(compared, requests):
    found = only(compared({"needed": 60}, {"needed": 60}))

    assert "both sides together would take" in found.detail
    assert "prepare" not in [request["do"] for request in requests("base")]


@pytest.mark.parametrize("what", ["die_at", "fail_at", "hang_at", "babble_at"])
def test_broken_worker_is_replaced_for_the_next_case(compared, requests, what):
    rules = replace(RULES, timeout_s=1.0)

    found = compared({}, {what: "turn"}, cases=(CASE, OTHER), rules=rules)

    assert [result.confirmation.verdict for result in found.values()] == [Verdict.NO_DATA] * 2
    assert all(result.detail.startswith("head") for result in found.values())
    # The first one's twice: before anything is timed, and before it measures.
    assert [r["do"] for r in requests("head")].count("describe") == 3


def test_hanging_worker_is_killed_with_its_processes(compared, running):
    found = only(compared({}, {"hang_at": "prepare"}, rules=replace(RULES, timeout_s=0.5)))

    assert found.detail == "head gave no answer to 'prepare' in 0.5 s and was ended"
    assert running("head") == []


def test_interrupted_comparison_leaves_no_process(compared, running):
    def interrupt(_case, _block):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared(on_block=interrupt)

    assert running("base") == running("head") == []


def test_last_line_of_a_dead_worker_is_the_reason(compared):
    found = only(compared({}, {"die_at": "place"}))

    assert found.detail == ("head died (exit code 3) at 'place': ImportError: no module named gone")


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"die_at": "describe"}, "head died .* no module named gone"),
        ({"version": 2}, "head speaks version 2 of the messages"),
        ({"root": "/elsewhere"}, "head ran the code of /elsewhere"),
    ],
)
def test_head_worker_that_does_not_start_ends_the_comparison(compared, behaviour, message):
    with pytest.raises(BrokenRevisionError, match=message):
        compared({}, behaviour)


def test_base_worker_that_does_not_start_blames_no_revision(compared):
    with pytest.raises(WorkerError, match=r"base died .* no module named gone"):
        compared({"die_at": "describe"}, {"die_at": "describe"})


def test_workers_on_two_devices_are_refused(compared):
    with pytest.raises(InfrastructureError, match="don't share a device"):
        compared({"uuid": "GPU-1"}, {"uuid": "GPU-2"})


def test_many_cases_are_judged_at_the_rate_of_a_look(compared):
    # Alone at its p-value it is slower; among hundreds that are not, it is not beyond chance.
    unsure = {"us": 103, "offsets": [0.03, -0.005, 0.01, 0.0, 0.015]}
    one = only(compared({}, unsure))
    same = replace(one, confirmation=replace(one.confirmation, p_value=1.0, verdict=Verdict.SAME))

    assert [result.confirmation.verdict for result in confirm_comparisons([one])] == [
        Verdict.SLOWER
    ]
    crowd = confirm_comparisons([one, *[same] * 300])
    assert {result.confirmation.verdict for result in crowd} == {Verdict.AMBIGUOUS, Verdict.SAME}
    assert InterleaveRules(looks=2).rate == pytest.approx(FALSE_DISCOVERY_RATE / 2)


@pytest.mark.parametrize(
    "few", [{"processes": 4}, {"processes": 5, "blocks": 1}, {"processes": 5, "looks": 0}]
)
def test_rules_with_too_few_blocks_are_refused(few):
    with pytest.raises(UsageError):
        InterleaveRules(**few)


@pytest.mark.parametrize(("processes", "placements"), [(1, 6), (2, 3), (4, 2), (6, 1), (12, 1)])
def test_fewer_processes_have_more_placements_each(processes, placements):
    assert InterleaveRules.with_processes(processes).placements == placements
