"""Error rates of the accuracy gate on a real model: false failures, and undetected losses.

    python benchmarks/accuracy/gate_errors.py --model DIR --data FILE [--gates 300] [--draws 300]
        [--policy default] [--texts wikitext,code] [--context 256] [--max-tokens 8000]
        [--processes 1]

Equal models: the gate judges copies of the model that compute the same in another order. The
channels of each feed-forward are permuted, with a seed, which changes the order of every reduction
over them, and 1 to 8 segments are computed together. No copy may fail.

Alpha and power: noise is added to the weights so that the model loses 1 % of the perplexity on the
first text. Whole gates are replayed on its results: each text's segments are drawn with
replacement, with their losses and their tokens' divergences and agreement, and `gate_accuracy`
decides how many it looks at, and judges them. A drawn text has twice the segments that its test
plans for these losses, because power is planned for texts that are long enough; the real text may
be shorter, and is then not judged (`segments`: those that it has, and that are planned). The mean
loss of each text is set to what the policy accepts, and the limits of divergence, agreement and
tails to the values of the whole text: the worst model that must pass. The share of gates that fail
is compared with alpha. With the loss that must be detected on the first text, the share that fails
there is compared with the planned power.

Prints a JSON object for each of the three. Exit code 1: an equal model failed, the power is more
than three standard errors below the plan, or alpha is that far above it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import corruptions
import numpy as np
import torch
from corruptions import AT_ONCE, Bench, in_processes
from damages import NOTHING, add_noise
from numpy.typing import NDArray

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.agreement import (
    AgreementMeter,
    ReferenceLogits,
    TokenValues,
    record_reference,
)
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.results import FULL_PRECISION, KL_QUANTILES, ORIGINAL
from flexq_bench.accuracy.setup import PreparedModel, best_device
from flexq_bench.accuracy.texts import Text, read_text
from flexq_bench.ci.accuracy_gate.checks.agreement import AgreementLimit
from flexq_bench.ci.accuracy_gate.checks.kl import KlLimit
from flexq_bench.ci.accuracy_gate.checks.perplexity import PerplexityLimit
from flexq_bench.ci.accuracy_gate.checks.tail import TailLimit
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy, CheckLimit
from flexq_bench.ci.accuracy_gate.gate import gate_accuracy, planned_evaluation
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.db.engine import open_database
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.stats import tail_excess

MOST_TOGETHER = 8  # segments
Losses = NDArray[np.float64]
_MOST_DRAWN_FROM = 240  # segments of a text
_LONGER = 2  # times the planned segments: their number is estimated anew from each draw
LOSS = math.log1p(0.01)  # nats a token: 1 % of the perplexity


def permute_channels(model: Any, seed: float) -> None:
    """The same function, summed in another order."""
    generator = torch.Generator().manual_seed(int(seed))
    for module in list(model.modules()):
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            order = torch.randperm(module.up_proj.weight.shape[0], generator=generator)
            for layer in (module.gate_proj, module.up_proj):
                layer.weight.copy_(layer.weight[order].clone())
            module.down_proj.weight.copy_(module.down_proj.weight[:, order].clone())


def judged_policy(options: argparse.Namespace) -> AccuracyPolicy:
    """The limits of texts: weights differ by rows between models that compute the same."""
    policy = corruptions.judged_policy(options)
    return dataclasses.replace(policy, limits=tuple(x for x in policy.limits if x.texts))


def equal_models(bench: Bench, seeds: Iterable[int], processes: int = 1) -> dict[str, int]:
    """Number of gates by exit code, on models that are equal to the original."""
    same = dataclasses.replace(NOTHING, name="same", damage=permute_channels)

    def judge(seed: int) -> int:
        at_once = 1 + seed % MOST_TOGETHER
        report, _ = bench.judge(same, seed, FULL_PRECISION, at_once=at_once)
        return int(report.exit_code)

    codes = told(in_processes(processes, [(seed,) for seed in seeds], judge))
    return {str(code): count for code, count in sorted(Counter(codes).items())}


def told(results: Iterable[Any]) -> Iterator[Any]:
    """Yield results. stderr gets each, so that a command that is ended has shown what it knew."""
    for number, result in enumerate(results, 1):
        sys.stderr.write(f"{number}: {result}\n")
        yield result


@dataclass(frozen=True, slots=True)
class TextResults:
    """A text under the original and a model that loses. tokens: values of each segment's tokens."""

    reference: ReferenceLogits
    nll: Losses
    tokens: Sequence[TokenValues]

    @property
    def losses(self) -> Losses:
        losses: Losses = self.nll - np.array(self.reference.result.nll)
        return losses

    def with_loss(self, loss: float) -> TextResults:
        """The same results with this mean loss, nats per token."""
        return dataclasses.replace(self, nll=self.nll - self.losses.mean() + loss)

    def drawn(self, rng: np.random.Generator, count: int) -> TextResults:
        """Draw so many segments with replacement."""
        rows = rng.integers(self.nll.size, size=count)
        result = self.reference.result.of(rows.tolist())
        reference = ReferenceLogits(self.reference.head, (), (), result)
        return TextResults(reference, self.nll[rows], [self.tokens[row] for row in rows])


def fitted_results(bench: Bench) -> tuple[float, dict[str, TextResults]]:
    """Size of the noise that loses 1 % on the first text, and its results on each text."""
    model, evaluator = bench.original.model, bench.prepared.evaluator
    segments = {text: evaluator.text_ids(text)[:_MOST_DRAWN_FROM] for text in evaluator.available}
    references = {
        text: record_reference(model, ids.flatten(), context=ids.shape[1])
        for text, ids in segments.items()
    }

    def noisy(share: float, text: str) -> TextResults:
        noisy = copy.deepcopy(model)
        with torch.no_grad():
            add_noise(noisy, share)
        meter, ids = AgreementMeter(references[text]), segments[text]
        result = perplexity(
            noisy, ids.flatten(), context=ids.shape[1], on_logits=meter, at_once=AT_ONCE
        )
        return TextResults(references[text], np.array(result.nll), meter.parts)

    share, first = 0.02, next(iter(segments))
    for _ in range(3):  # the loss grows as its square; `with_loss` sets it exactly
        share *= math.sqrt(LOSS / max(LOSS / 25, noisy(share, first).losses.mean()))
    return share, {text: noisy(share, text) for text in segments}


class DrawnEvaluator(Evaluator):
    """Looks the results of drawn segments up, in place of computing them."""

    def __init__(self, original: LoadedModel, plan: Any, drawn: Mapping[str, TextResults]) -> None:
        self._drawn = drawn
        super().__init__(original, plan, None, _DrawnReference(drawn))

    def distinct_segments(self, text: str) -> tuple[tuple[int, ...], int]:
        count = self._drawn[text].nll.size
        return tuple(range(count)), count

    def _segment_count(self, text: str) -> int:
        return int(self._drawn[text].nll.size)

    def places(self, text: str) -> Sequence[int]:
        return range(self._drawn[text].nll.size)

    def _computed(
        self,
        scheme: str,
        model: LoadedModel,
        text: Text,
        meter: AgreementMeter | None,
        counts: tuple[int, int],
    ) -> Any:
        drawn, (done, wanted) = self._drawn[text.name], counts
        assert meter is not None  # there is a reference
        meter.parts += drawn.tokens[done:wanted]
        result = drawn.reference.result
        return dataclasses.replace(
            result, nll=tuple(drawn.nll[done:wanted].tolist()), by_position=()
        )


class _DrawnReference:
    """See ReferencePredictions."""

    name = content_hash = "drawn"
    model: LoadedModel | None = None

    def __init__(self, drawn: Mapping[str, TextResults]) -> None:
        self._drawn = drawn

    def predictions(self, text: Text, tokens: Any, count: int) -> ReferenceLogits:
        return self._drawn[text.name].reference

    def known(self, text: Text) -> ReferenceLogits:
        return self._drawn[text.name].reference


class Replay:
    """Gates on drawn segments. A policy's limits are what the results of whole texts have."""

    def __init__(self, bench: Bench, policy: AccuracyPolicy, data: str) -> None:
        self._bench, self._text = bench, read_text(data)
        self.noise, results = fitted_results(bench)
        # A model without a chat template has no results on chats, for example.
        judged = [limit for limit in policy.limits if set(limit.texts) <= results.keys()]
        limits, self._results, self.detect = [], {}, {}
        for limit in judged:
            table = limit.table
            if isinstance(table, PerplexityLimit):
                detect = table.detect or policy.planned.detect
                plan = limit.check.text_plan(table, policy.planned, policy.planned_alpha)
                assert plan is not None, "the policy plans its tests"
                assert detect is not None
                self.detect[table.text] = math.log1p(detect / 100)
                self._results[table.text] = results[table.text].with_loss(plan.accepted)
                table = table.model_copy(update={"at_most": None})
                limits.append(CheckLimit(limit.check, table))
        for limit in judged:
            exact = at_its_values(limit.table, results[limit.texts[0]], self._results)
            limits += [] if exact is None else [CheckLimit(limit.check, exact)]
        self._results = {**results, **self._results}
        self.policy = dataclasses.replace(policy, limits=tuple(limits))
        self.segments = {text: (part.nll.size, part.nll.size) for text, part in results.items()}
        for text, plan in self.policy.text_plans().items():
            centred = self._results[text]
            planned = int(plan.test.needed(centred.losses - plan.accepted))
            self.segments[text] = centred.nll.size, planned

    def judge(self, seed: int, lossy: str | None) -> tuple[int, list[str]]:
        """Exit code and failing limits of one gate. lossy: a text with the loss to detect."""
        rng = np.random.default_rng([seed, lossy is not None])
        results = dict(self._results)
        if lossy is not None:
            results[lossy] = results[lossy].with_loss(self.detect[lossy])
        plan, missing = planned_evaluation(
            self.policy, [FULL_PRECISION], ORIGINAL, [self._text], None, batch=8, calibration=None,
            seed=0, reference="drawn",
        )  # fmt: skip
        plan = dataclasses.replace(plan, context=self._bench.prepared.evaluator.context)
        drawn = {
            text: part.drawn(rng, max(part.nll.size, _LONGER * self.segments[text][1]))
            for text, part in results.items()
        }
        evaluator = DrawnEvaluator(self._bench.original, plan, drawn)
        with open_database(f"{self._bench.folder}/{os.getpid()}.sqlite") as database:
            origin = dataclasses.replace(
                self._bench.prepared.origin, run=new_run(SUITE, "manual", ())
            )
            report = gate_accuracy(
                self.policy, PreparedModel(plan, evaluator, origin), database, [FULL_PRECISION],
                ORIGINAL, missing, on_unit=lambda unit, found: None, diagnose=False,
            )  # fmt: skip
        failing = [limit.check for limit in report.with_outcome(GateOutcome.FAIL)]
        return int(report.exit_code), failing


def at_its_values(
    table: Any, results: TextResults, centred: Mapping[str, TextResults]
) -> Any | None:
    """A table of limits that are exactly the values of results; None: another kind of table."""
    every = TokenValues(*(torch.stack(values) for values in zip(*results.tokens, strict=True)))
    kl = np.sort(every.kl.double().numpy(), axis=None)
    if isinstance(table, KlLimit):
        values = {"mean": float(kl.mean())} | {
            name: float(kl[math.ceil(share * kl.size - 1e-9) - 1])
            for name, share in KL_QUANTILES.items()
        }
        kept = {name: values[name] for name in table.bounds if name != "max"}
        return table.model_copy(update={**kept, "max": None})
    if isinstance(table, AgreementLimit):
        means = {name: float(getattr(every, name).double().mean()) for name in table.bounds}
        return table.model_copy(update=means)
    if isinstance(table, TailLimit):
        losses = centred.get(table.text, results).losses
        excess = tail_excess(losses).estimate
        return table.model_copy(update={"percent": max(1e-6, 100 * math.expm1(excess))})
    return None


def main() -> int:
    """Judge, fit, draw; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs=1)
    parser.add_argument("--policy", default="default")
    parser.add_argument("--texts", help="of the policy; default: all")
    parser.add_argument("--gates", type=int, default=300)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first equal model")
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default=best_device())
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // options.processes))
    policy = judged_policy(options)
    bench = Bench(options, policy)
    seeds = range(options.first, options.first + options.gates)
    codes = equal_models(bench, seeds, options.processes)
    right = say(
        {"texts": policy.texts, "equal_models_by_exit_code": codes}, not codes.keys() - {"0"}
    )
    if not options.draws:
        bench.close()
        return 0 if right else 1
    torch.set_num_threads(threads)  # in this process; its forks have the fewer
    replay = Replay(bench, policy, options.data[0])
    torch.set_num_threads(max(1, threads // options.processes))
    rates, count = policy.planned, options.draws
    draws: list[tuple[int, str | None]] = [(seed, None) for seed in range(count)]
    equal = list(told(in_processes(options.processes, draws, replay.judge)))
    failed = sum(bool(failing) for _, failing in equal)
    found = {
        "noise_of_1_percent": replay.noise,
        "gates_of_the_worst_accepted_model": count,
        "limits": sum(len(limit.names) for limit in replay.policy.limits),
        "failed": failed,
        "by_exit_code": Counter(code for code, _ in equal),
        "failing_limits": Counter(name for _, failing in equal for name in failing),
        "planned_share": rates.alpha,
        "segments": replay.segments,
    }
    right &= say(found, failed / count <= rates.alpha + 3 * _error(rates.alpha, count))
    lossy_text = policy.texts[0]
    draws = [(seed, lossy_text) for seed in range(count)]
    lossy = list(told(in_processes(options.processes, draws, replay.judge)))
    bench.close()
    caught = sum(f"perplexity of {lossy_text}" in failing for _, failing in lossy)
    found = {"gates_with_a_loss": count, "caught": caught, "planned_share": rates.power}
    right &= say(found, caught / count >= rates.power - 3 * _error(rates.power, count))
    return 0 if right else 1


def say(found: Mapping[str, Any], right: bool) -> bool:
    """Print what was found; returns whether it is right."""
    sys.stdout.write(json.dumps({**found, "right": right}) + "\n")
    sys.stdout.flush()
    return right


def _error(share: float, draws: int) -> float:
    return math.sqrt(share * (1 - share) / max(1, draws))


if __name__ == "__main__":
    sys.exit(main())
