"""Few test cases that together have every value of each parameter and every pair of options.

A covering array of strength two over the fields of a configuration, and of strength one over other
parameters (Kuhn, Kacker and Lei 2013, ch. 1). The cases are chosen greedily, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations

Feature = tuple[Hashable, ...]


def features(parameters: Mapping[str, object]) -> frozenset[Feature]:
    """What a case covers: each parameter's value, or each pair of options of a configuration."""
    covered: set[Feature] = set()
    for name, value in parameters.items():
        if not is_dataclass(value):
            covered.add((name, repr(value)))
            continue
        options = [(field.name, repr(getattr(value, field.name))) for field in fields(value)]
        kind = type(value).__name__
        covered.update((name, kind, *pair) for pair in combinations(options, 2))
    return frozenset(covered)


def covering(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Indices of cases, in order, that cover all features of all cases."""
    of_case = [features(case) for case in cases]
    missing = frozenset().union(*of_case)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(of_case[i] & missing), -i))
        chosen.append(best)
        missing -= of_case[best]
    return sorted(chosen)
