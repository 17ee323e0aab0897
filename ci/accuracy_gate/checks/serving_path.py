"""The path that serves: decode's engine against transformers, and its greedy texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from flexq_bench.accuracy.as_decode import decoded_architecture
from flexq_bench.accuracy.results import KERNELS
from flexq_bench.accuracy.serving_path import (
    IN_FP16,
    Generations,
    PathPhase,
    PathPlan,
    greedy,
    serving_path,
)
from flexq_bench.ci.accuracy_gate.contract import (
    Check,
    CheckContext,
    LimitOutcome,
    NotJudgedError,
    Stage,
)
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.errors import one_line
from flexq_bench.kernels.errors import KernelError
from flexq_bench.workloads.data_files import Amount, Count, DataTable, Share

_NAME = "serving path"
_GREEDY = f"{_NAME}: greedy texts"
_PROMPT = 32  # tokens that are continued


class ServingPathLimit(DataTable):
    """Limits of the engine's divergence from transformers, in multiples of that of rounding.

    batches, steps: as in PathPlan. tokens: of a sequence at most. mean: of a phase; worst: of a
    token. prompts, new: texts that the engine and the original continue, and tokens of each.
    agreement: least mean share of the original's tokens before the first that differs. looping,
    ended: largest difference of the share of texts that end in a loop, or with an end token.
    length: largest relative difference of the mean length.
    """

    batches: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 3, 8, 32)
    tokens: Count = 512
    steps: Count = 12
    mean: Amount = 3.0
    worst: Amount = 5.0
    prompts: Count = 16
    new: Count = 48
    agreement: Share = 0.1
    looping: Share = 0.25
    ended: Share = 0.25
    length: Amount = 0.5


class ServingPathCheck(Check[ServingPathLimit]):
    """Forced decoding and greedy texts, through the kernels that decode would run."""

    key, table, stage = "serving_path", ServingPathLimit, Stage.MODEL

    def names(self, limit: ServingPathLimit) -> tuple[str, ...]:
        return (_NAME,)

    def judge(self, limit: ServingPathLimit, context: CheckContext) -> Iterator[LimitOutcome]:
        setup, words = context.setup, f"{limit.mean:g} x rounding, a token {limit.worst:g} x"
        if setup.evaluator.through != KERNELS:
            raise NotJudgedError("kernels do not compute here: use a GPU, or --through kernels")
        if decoded_architecture(context.model.model) is None:
            raise NotJudgedError(f"decode does not have {type(context.model.model).__name__}")
        sequences = _sequences(context, limit)
        prompts = sequences[: limit.prompts, : min(_PROMPT, sequences.shape[1] // 2)]
        model = context.model.model
        new = min(limit.new, context.model.context() - prompts.shape[1])
        ends = _end_ids(context)
        try:
            result = serving_path(
                model,
                sequences,
                prompts,
                PathPlan(tuple(dict.fromkeys(limit.batches)), limit.steps),
                kv_bits=setup.evaluator.kv_bits(context.scheme),
                new=new,
                ends=ends,
                progress=context.progress,
            )
        except torch.OutOfMemoryError as error:
            raise NotJudgedError("too little GPU memory for the engine beside the model") from error
        except (KernelError, RuntimeError, ValueError) as error:  # it would break while serving
            reason = one_line(error)
            yield LimitOutcome(context.scheme, _NAME, GateOutcome.FAIL, reason, words)
            return
        yield _judged_phases(limit, context, result.phases, words)
        own = greedy(context.original.model, prompts, new, ends)
        yield _judged_texts(limit, context, result.generations, own)


def _judged_phases(
    limit: ServingPathLimit, context: CheckContext, phases: Sequence[PathPhase], words: str
) -> LimitOutcome:
    wrong = [
        phase
        for phase in phases
        if phase.mean > limit.mean or phase.worst > limit.worst or phase.wrong_picks
    ]
    worst = max(wrong or phases, key=lambda phase: (phase.mean, phase.worst))
    reason = ""
    if wrong:
        batches = ", ".join(map(str, sorted({phase.batch for phase in wrong})))
        kinds = " and ".join(sorted({f"{phase.phase}s" for phase in wrong}))
        reason = f"{kinds} at batch {batches} are wrong ({len(wrong)} of {len(phases)} phases)"
    tokens = sum(len(phase.kl) for phase in phases)
    last = max(int(phase.positions.max()) for phase in phases)
    return LimitOutcome(
        context.scheme,
        _NAME,
        GateOutcome.FAIL if wrong else GateOutcome.PASS,
        reason,
        words,
        value=worst.mean,
        unit="x rounding",
        coverage=f"{tokens:,} tokens, batch {', '.join(map(str, limit.batches))}, "
        f"up to position {last:,}",
        cause=_cause(wrong),
        details=tuple(map(_described, wrong)),
    )


def _cause(wrong: Sequence[PathPhase]) -> str:
    if not wrong:
        return ""
    if any(phase.wrong_picks for phase in wrong):
        return "tokens are picked that are not the likeliest, or stored at a wrong position"
    if any(phase.layers == IN_FP16 for phase in wrong):
        return "attention, KV cache, norms or activations are wrong: weights in FP16 show it too"
    return "the linear layers' kernels, or what packs their inputs, are wrong while decoding"


def _described(phase: PathPhase) -> str:
    picks = f", {phase.wrong_picks} tokens picked wrongly" if phase.wrong_picks else ""
    at = int(phase.positions[phase.kl.argmax()])
    return (
        f"{phase.name} ({phase.layers}): mean {phase.mean:.3g} x rounding over {len(phase.kl)} "
        f"tokens, {phase.worst:.3g} x at position {at}{picks}"
    )


def _judged_texts(
    limit: ServingPathLimit, context: CheckContext, texts: Generations, own: Generations
) -> LimitOutcome:
    agreement = texts.agreement(own)
    longer = texts.mean_length / own.mean_length - 1
    loops = texts.share_looping - own.share_looping
    ended = texts.share_ended - own.share_ended
    failing = [
        reason
        for fails, reason in (
            (agreement < limit.agreement, f"{100 * agreement:.0f} % are the original's tokens"),
            (loops > limit.looping, f"{100 * texts.share_looping:.0f} % end in a loop"),
            (abs(ended) > limit.ended, f"{100 * texts.share_ended:.0f} % end with an end token"),
            (abs(longer) > limit.length, f"{texts.mean_length:.0f} tokens long"),
        )
        if fails
    ]
    compared = (
        f"{kind}: {100 * ours:.0f} %, the original {100 * theirs:.0f} %"
        for kind, ours, theirs in (
            ("ended by an end token", texts.share_ended, own.share_ended),
            ("ending in a loop", texts.share_looping, own.share_looping),
        )
    )
    return LimitOutcome(
        context.scheme,
        _GREEDY,
        GateOutcome.FAIL if failing else GateOutcome.PASS,
        "; ".join(failing),
        f"agreement at least {limit.agreement:g}",
        value=agreement,
        unit="share",
        coverage=f"{len(texts.tokens)} texts of {texts.mean_length:.0f} tokens, "
        f"the original's {own.mean_length:.0f}",
        details=tuple(compared) if failing else (),
    )


def _sequences(context: CheckContext, limit: ServingPathLimit) -> torch.Tensor:
    """Segments from all texts of the longest segments in turn, int64 [at most a batch, tokens]."""
    setup, count = context.setup, max(*limit.batches, limit.prompts)
    if not setup.evaluator.available:
        raise NotJudgedError("no text makes tokens for the engine: give --data NAME=FILE")
    of_texts = [setup.evaluator.text_ids(text) for text in setup.evaluator.available]
    longest = max(ids.shape[1] for ids in of_texts)
    of_texts = [ids for ids in of_texts if ids.shape[1] == longest]
    share = -(-count // len(of_texts))
    chosen = [ids[torch.linspace(0, len(ids) - 1, min(share, len(ids))).long()] for ids in of_texts]
    return torch.cat(chosen)[:count, : limit.tokens]


def _end_ids(context: CheckContext) -> frozenset[int]:
    """Ids that end a text of the model that is served."""
    model: Any = context.model.model
    described = getattr(model, "generation_config", None) or model.config
    ids = described.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id
    return frozenset(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
