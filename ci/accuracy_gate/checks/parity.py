"""Parity: the output of each quantized layer, by a kernel and by the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flexq_bench.accuracy.parity import SiteParity, kernel_parity
from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.workloads.data_files import Amount, DataTable, Texts

_NAME = "parity of kernels"


class ParityLimit(DataTable):
    """Largest accepted error of kernels: see flexq_bench.accuracy.parity.

    kernels: the only ones to compare with; None: for each layer the one for its formats.
    """

    tolerance: Amount
    kernels: Texts | None = None


class ParityCheck(Check[ParityLimit]):
    """The quantized layers of a model, each against a kernel."""

    key, table, stage = "parity", ParityLimit, Stage.MODEL

    def names(self, limit: ParityLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: ParityLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        if context.scheme in (FULL_PRECISION, ORIGINAL):
            return  # no layer is quantized
        setup = context.setup
        if not setup.plan.texts:
            raise NotJudgedError("no text makes inputs for the layers: give --data NAME=FILE")
        sites = kernel_parity(
            context.original.model,
            context.model.model,
            setup.evaluator.text_ids(setup.plan.texts[0].name)[0],
            limit.kernels,
            backend="cpu" if setup.origin.device.backend == "cpu" else "cuda",
        )
        compared = [site for site in sites if site.kernel]
        errors = [site.max_rel_error for site in sites if site.max_rel_error is not None]
        worst = max(errors, default=math.inf)
        outcome, reason = _outcome(sites, limit.tolerance)
        yield LimitOutcome(
            context.scheme,
            _NAME,
            outcome,
            reason,
            f"at most {limit.tolerance:g}",
            value=worst if math.isfinite(worst) else None,
            unit="relative error",
            coverage=f"{len(compared)} of {len(sites)} layers",
        )


def _outcome(sites: Sequence[SiteParity], tolerance: float) -> tuple[GateOutcome, str]:
    wrong = [s for s in sites if s.max_rel_error is not None and s.max_rel_error > tolerance]
    others = [site for site in sites if site.max_rel_error is None]
    if wrong:
        reason = f"{wrong[0].kernel} differs at {wrong[0].site} ({len(wrong)} of {len(sites)})"
        return GateOutcome.FAIL, reason
    if others:  # without a kernel for its formats, or one that does not run here
        place = f"{others[0].kernel} at {others[0].site}".removeprefix(" at ")
        return (
            GateOutcome.NOT_JUDGED,
            f"{place} ({len(others)} of {len(sites)}): {others[0].detail}",
        )
    return GateOutcome.PASS, ""
