"""The looks (interim analyses) of a comparison: which cases get more pairs of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from flexq_bench.measure.ab.rules import InterleaveRules, confirm_comparisons
from flexq_bench.verdicts import CaseComparison

_Pair = TypeVar("_Pair")

log = logging.getLogger(__name__)


def look_by_look(
    pairs: Sequence[_Pair],
    rules: InterleaveRules,
    measure: Callable[[Sequence[_Pair], int], None],
    judge: Callable[[_Pair], CaseComparison],
    is_over: Callable[[], bool] = lambda: False,
    expect: Callable[[_Pair, int | None], None] = lambda _pair, _processes: None,
) -> Iterator[CaseComparison]:
    """Measure pairs of cases until each is decided; yield one result each, decided ones first.

    measure: called with cases and the number of pairs of processes that they have afterwards; those
    that need the fewest more come first. judge: one case alone, by what was measured so far.
    is_over: returns True if nothing more is measured, whatever is decided. expect: called with a
    case and the number of pairs of processes that it will probably need; None: it has ended.

    Clear changes get a few more pairs of processes instead of a whole look. This spends no
    additional error: such a change was slower or faster in the look before. Neither do the stages
    before looks, at which no case ends as slower or faster, or with two speeds. A case that all
    looks are unlikely to decide (`InterleaveRules.is_hopeless`) ends at any stage.
    """
    undecided = list(pairs)
    decided: list[CaseComparison] = []

    def judge_together() -> Sequence[CaseComparison]:
        # With the decided ones, as the caller judges all in the end.
        return confirm_comparisons([*decided, *results], rules)[len(decided) :]

    stages = rules.stages
    for pairs_now, is_look in stages.items():
        measure(undecided, pairs_now)
        results = [judge(pair) for pair in undecided]
        together = judge_together()
        is_enough = [
            rules.is_enough(result) and (is_look or not _waits_for_look(result))
            for result in together
        ]
        is_last = pairs_now == rules.most_pairs or is_over()
        if is_look and not is_last:
            clear = [i for i, result in enumerate(together) if result.is_clear and not is_enough[i]]
            enough = partial(rules.pairs_for_clear, len(clear), len(pairs))
            wanted = {i: enough(is_far=together[i].is_far) for i in clear}
            wanted = {i: processes for i, processes in wanted.items() if processes < 2 * pairs_now}
            for i, processes in wanted.items():
                expect(undecided[i], processes)
            for processes in sorted(set(wanted.values())):
                measure([undecided[i] for i in wanted if wanted[i] >= processes], processes)
            for i in wanted:
                results[i] = judge(undecided[i])
            together = judge_together()
            for i in wanted:
                # Any other verdict waits for the next look.
                now = together[i]
                is_enough[i] = now.is_clear and rules.is_enough(now, enough(is_far=now.is_far))
            is_last = is_over()
        again: list[tuple[int, _Pair]] = []
        for i, pair in enumerate(undecided):
            needed = None if is_enough[i] else rules.pairs_needed(together[i])
            if is_enough[i] or is_last or rules.is_hopeless(together[i]):
                expect(pair, None)
                ended = results[i] if is_enough[i] else replace(results[i], pairs_needed=needed)
                decided.append(ended)
                yield ended
                continue
            least = needed or rules.most_pairs
            later = (end for end in stages if end >= max(least, pairs_now + 1))
            expect(pair, min(later, default=rules.most_pairs))
            again.append((least, pair))
        if not again:
            return
        undecided = [pair for _, pair in sorted(again, key=lambda item: item[0])]
        log.info("%d cases are not decided: another look", len(undecided))


def _waits_for_look(result: CaseComparison) -> bool:
    """Return True if a case does not end before a look.

    Bounds within two speeds of few processes are too narrow: what chance makes of an outlier.
    """
    return result.is_changed or result.confirmation.modes is not None
