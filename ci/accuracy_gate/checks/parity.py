"""Parity: every launch of each layer's kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from flexq_bench.accuracy.parity import LaunchParity, differing_weights, kernel_parity
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.workloads.data_files import Amount, Count, DataTable, Texts

_NAME = "parity of kernels"
_SHOWN_TOKENS, _SHOWN_CONFIGS = 20, 2


class ParityLimit(DataTable):
    """Largest accepted error of kernels: see flexq_bench.accuracy.parity.

    kernels: taken for their formats in place of those that decode. largest_batch: of steps.
    """

    tolerance: Amount
    kernels: Texts | None = None
    largest_batch: Count = 32


class ParityCheck(Check[ParityLimit]):
    """The layers of a model, at every number of tokens and configuration, against the reference."""

    key, table, stage = "parity", ParityLimit, Stage.MODEL

    def names(self, limit: ParityLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: ParityLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        setup, model = context.setup, context.model.model
        text = next(iter(setup.evaluator.available), None)
        if text is None:
            raise NotJudgedError("no text makes inputs for the layers: give --data NAME=FILE")
        segment = setup.evaluator.text_ids(text)[0]
        launches = list(
            kernel_parity(
                model,
                segment,
                largest_batch=limit.largest_batch,
                labels=limit.kernels or (),
                progress=context.progress,
            )
        )
        if not launches:
            return  # transformers computes layers that are not quantized
        compared = [launch for launch in launches if launch.kernel]
        wrong = [launch for launch in compared if not launch.max_rel_error <= limit.tolerance]
        worst = max((launch.max_rel_error for launch in compared), default=math.inf)
        outcome, reason = _outcome(launches, wrong, differing_weights(model))
        layers = {launch.layer for launch in launches}
        yield LimitOutcome(
            context.scheme,
            _NAME,
            outcome,
            reason,
            f"at most {limit.tolerance:g}",
            value=worst if math.isfinite(worst) else None,
            unit="relative error",
            coverage=f"{len({x.layer for x in compared})} of {len(layers)} layers, "
            f"1 to {max((x.m for x in compared), default=0):,} tokens, {len(compared):,} launches",
            details=tuple(_details(wrong)),
        )


def _outcome(
    launches: Sequence[LaunchParity], wrong: Sequence[LaunchParity], differing: Sequence[str]
) -> tuple[GateOutcome, str]:
    if differing:
        reason = f"{differing[0]} was evaluated with other weights than its codes"
        return GateOutcome.FAIL, f"{reason} ({len(differing)} layers)"
    if wrong:
        first = wrong[0]
        counts = f"{len({launch.layer for launch in wrong})} layers, {len(wrong)} launches"
        return (
            GateOutcome.FAIL,
            f"{first.kernel} differs at {first.layer} with {first.m} tokens ({counts})",
        )
    others = [launch for launch in launches if not launch.kernel]
    if others:
        reason = f"{others[0].layer} ({len(others)} layers): {others[0].detail}"
        return GateOutcome.NOT_JUDGED, reason
    return GateOutcome.PASS, ""


def _details(wrong: Sequence[LaunchParity]) -> Iterator[str]:
    """A line for each kernel: the numbers of tokens that are wrong, and their configurations."""
    for kernel, launches in groupby(sorted(wrong, key=lambda x: x.kernel), lambda x: x.kernel):
        of_kernel = list(launches)
        tokens = sorted({launch.m for launch in of_kernel})
        configs = dict.fromkeys(str(x.config) for x in of_kernel if x.config is not None)
        named = "".join(f"; {config}" for config in list(configs)[:_SHOWN_CONFIGS])
        why = next((f": {x.detail}" for x in of_kernel if x.detail), "")
        shown = ", ".join(map(str, tokens[:_SHOWN_TOKENS]))
        more = " …" if len(tokens) > _SHOWN_TOKENS else ""
        yield f"{kernel}: wrong with {shown}{more} tokens{named}{why}"
