"""Verdicts and causes: the words of every decision."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """Result of a comparison of two commits, or of a result with its history."""

    SAME = "same"  # a change as large as the smallest that counts is ruled out
    SLOWER = "slower"
    FASTER = "faster"
    AMBIGUOUS = "ambiguous"  # the data does not decide: more of it would
    NO_DATA = "no-data"  # too little that may be compared; the reason says what is missing
    INCORRECT = "incorrect"  # a wrong result has no speed
    CANDIDATE = "candidate"  # of a trigger only: worth confirming


class Cause(StrEnum):
    """Origin of a change."""

    NONE = "none"  # nothing changed
    CODE = "code"
    ENVIRONMENT = "environment"  # machine, driver, clocks: not the kernel
    BOTH = "code and environment"  # the machine changed too, and does not explain all of it
    UNCLEAR = "unclear"  # the anchors contradict each other, or there are none
