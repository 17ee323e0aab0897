"""Verdicts and causes of decisions."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """Result of a comparison of two commits, or of a result with its history."""

    SAME = "same"  # the bounds exclude a change of the smallest size that counts
    SLOWER = "slower"
    FASTER = "faster"
    AMBIGUOUS = "ambiguous"  # undecided: more data is needed
    NO_DATA = "no-data"  # too few comparable data; the reason says what is missing
    INCORRECT = "incorrect"  # a wrong result, so its time does not count
    CANDIDATE = "candidate"  # of a trigger only: needs a comparison


class Cause(StrEnum):
    """Origin of a change."""

    NONE = "none"  # nothing changed
    CODE = "code"
    ENVIRONMENT = "environment"  # machine, driver, clocks: not the kernel
    BOTH = "code and environment"  # the machine changed too, but does not explain the whole change
    UNCLEAR = "unclear"  # the anchors contradict each other, or there are none
