"""Artefacts: everything of the judged folder but its weights, against the original's folder."""

from __future__ import annotations

from collections.abc import Iterator

from flexq_bench.accuracy.artefacts.folders import compare_folders
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.accuracy_gate.judging import DifferencesLimit, judge_differences

_NAME = "artefacts"
_MAX_CHARACTERS = 200_000  # of each text that the tokenizers read


class ArtefactsCheck(Check[DifferencesLimit]):
    """Settings, tokenizer and chat templates of a folder: any difference fails."""

    key, table, stage = "artefacts", DifferencesLimit, Stage.FOLDERS

    def names(self, limit: DifferencesLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: DifferencesLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        judged, original = context.folders.judged, context.folders.original
        if judged is None or _is_in_memory(context):
            return
        if original is None:
            raise NotJudgedError("the original is no folder here: give it with --reference")
        texts = () if context.prepared is None else context.prepared.plan.texts
        context.progress("comparing folders")
        found = compare_folders(
            judged,
            original,
            [text.content[:_MAX_CHARACTERS] for text in texts],
            seed=context.seed,
        )
        yield judge_differences(context, _NAME, limit, found, "as the original's")


def _is_in_memory(context: CheckContext) -> bool:
    """Return True if the folder is a checkpoint, and the scheme is another one."""
    plan = None if context.prepared is None else context.prepared.plan
    return plan is not None and plan.checkpoint is not None and context.scheme != plan.schemes[-1]
