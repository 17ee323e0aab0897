"""The looks (interim analyses) of a comparison: which cases get more pairs of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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
) -> Iterator[CaseComparison]:
    """Measure pairs of cases until each is decided; yield one result each, decided ones first.

    measure: called with cases and the number of pairs of processes that they have afterwards.
    judge: one case alone, by what was measured so far.

    Clear changes get a few more pairs of processes instead of a whole look. This spends no
    additional error: such a change was slower or faster in the look before.
    """
    undecided = list(pairs)
    decided: list[CaseComparison] = []

    def judge_together() -> Sequence[CaseComparison]:
        # With the decided ones, as the caller judges all in the end.
        return confirm_comparisons([*decided, *results], rules)[len(decided) :]

    for look in range(rules.looks):
        measure(undecided, rules.pairs_of(look).stop)
        results = [judge(pair) for pair in undecided]
        together = judge_together()
        is_enough = [rules.is_enough(result) for result in together]
        is_last = look + 1 == rules.looks
        if not is_last:
            clear = [i for i, result in enumerate(together) if result.is_clear and not is_enough[i]]
            processes = rules.pairs_for_clear(len(clear), len(pairs))
            if processes < rules.pairs_of(look + 1).stop:
                measure([undecided[i] for i in clear], processes)
                for i in clear:
                    results[i] = judge(undecided[i])
                together = judge_together()
                for i in clear:
                    # Any other verdict waits for the next look.
                    is_enough[i] = together[i].is_clear and rules.is_enough(together[i], processes)
        again = []
        for pair, result, enough in zip(undecided, results, is_enough, strict=True):
            if is_last or enough:
                decided.append(result)
                yield result
            else:
                again.append(pair)
        if not again:
            return
        undecided = again
        log.info("%d cases are not decided: another look", len(undecided))
