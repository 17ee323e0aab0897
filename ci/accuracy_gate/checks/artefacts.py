"""Artefacts: everything of the judged folder but its weights, against the original's folder."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from flexq_bench.accuracy.artefacts.folders import compare_folders
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.workloads.data_files import DataTable, Texts

_NAME = "artefacts"
_MAX_CHARACTERS = 200_000  # of each text that the tokenizers read
_MAX_NAMED = 3  # differences in a reason


class ArtefactsLimit(DataTable):
    """Differences that are accepted. allow: patterns of their names, `config.rope_parameters.*`."""

    allow: Texts = ()


class ArtefactsCheck(Check[ArtefactsLimit]):
    """Settings, tokenizer and chat templates of a folder: any difference fails."""

    key, table, stage = "artefacts", ArtefactsLimit, Stage.FOLDERS

    def names(self, limit: ArtefactsLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: ArtefactsLimit, context: CheckContext) -> Iterator[LimitOutcome]:
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
        odd = [
            difference
            for difference in found
            if not any(fnmatchcase(difference.name, pattern) for pattern in limit.allow)
        ]
        reason = "; ".join(map(str, odd[:_MAX_NAMED]))
        if len(odd) > _MAX_NAMED:
            reason += f"; and {len(odd) - _MAX_NAMED} more"
        yield LimitOutcome(
            context.scheme,
            _NAME,
            GateOutcome.FAIL if odd else GateOutcome.PASS,
            reason or ", ".join(f"{difference.name} is allowed" for difference in found),
            "as the original's",
            value=float(len(odd)),
            unit="differences",
            cause=str(odd[0]) if odd else "",
            details=tuple(map(str, odd)),
        )


def _is_in_memory(context: CheckContext) -> bool:
    """Return True if the folder is a checkpoint, and the scheme is another one."""
    plan = None if context.prepared is None else context.prepared.plan
    return plan is not None and plan.checkpoint is not None and context.scheme != plan.schemes[-1]
