"""Error rates of the accuracy gate on a real model: false failures, and undetected losses.

    python benchmarks/accuracy/gate_errors.py --model DIR --data FILE [--gates 200] [--draws 1000]
        [--policy default] [--context 256] [--max-tokens 8000]

False failures: the gate judges copies of the model that compute the same in another order. The
channels of each feed-forward are permuted, with a seed, which changes the order of every reduction
over them, and 1 to 8 segments are computed together. No copy may fail.

Power and alpha: noise of a fitted size is added, so that the model loses exactly 1 % of the
perplexity on the text. Gates are simulated by drawing its segments with replacement, each segment
with its loss and its tokens' divergences and agreement; every simulated gate has `detect = 1` and
the looks of a real one. The share of gates that detect this loss is compared with the
planned power. Without the loss, and with limits of divergence and agreement equal to its values,
the model is the worst one that must pass: the share of gates in which *any* limit fails is compared
with alpha.

Prints one JSON object. Exit code 1: an equal model failed, the power is more than three standard
errors below the plan, or alpha is that far above it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
from typing import Any

import corruptions
import numpy as np
import torch
from corruptions import Bench
from damages import NOTHING, add_noise
from numpy.typing import NDArray

from flexq_bench.accuracy.agreement import Agreement, AgreementMeter, record_reference
from flexq_bench.accuracy.bos import chosen_bos, text_tokens
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.results import FULL_PRECISION, KL_QUANTILES
from flexq_bench.accuracy.setup import best_device
from flexq_bench.accuracy.texts import read_text
from flexq_bench.ci.accuracy_gate.checks.agreement import AgreementLimit
from flexq_bench.ci.accuracy_gate.checks.kl import KlLimit
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy, PlannedPower
from flexq_bench.ci.accuracy_gate.judging import clearly_beyond, far_end
from flexq_bench.exit_codes import ExitCode
from flexq_bench.stats import (
    GROWTH,
    MIN_VALUES,
    Decision,
    TestPlan,
    block_quantile_intervals,
    decide,
    mean_difference_interval,
)

MOST_TOGETHER = 8  # segments
Losses = NDArray[np.float64]
LOSS = math.log1p(0.01)  # nats a token: 1 % of the perplexity


def judged_policy(options: argparse.Namespace) -> AccuracyPolicy:
    """The limits of texts: weights differ by rows between models that compute the same."""
    policy = corruptions.judged_policy(options)
    limits = tuple(limit for limit in policy.limits if limit.texts)
    return dataclasses.replace(policy, limits=limits)


def permute_channels(model: Any, seed: float) -> None:
    """The same function, summed in another order."""
    generator = torch.Generator().manual_seed(int(seed))
    for module in list(model.modules()):
        if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            order = torch.randperm(module.up_proj.weight.shape[0], generator=generator)
            for layer in (module.gate_proj, module.up_proj):
                layer.weight.copy_(layer.weight[order].clone())
            module.down_proj.weight.copy_(module.down_proj.weight[:, order].clone())


def equal_models(bench: Bench, gates: int) -> dict[str, int]:
    """Number of gates by exit code, on models that are equal to the original."""
    codes: dict[str, int] = {}
    same = dataclasses.replace(NOTHING, name="same", damage=permute_channels)
    for seed in range(gates):
        report, *_ = bench.judge(same, seed, FULL_PRECISION, at_once=1 + seed % MOST_TOGETHER)
        codes[str(int(report.exit_code))] = codes.get(str(int(report.exit_code)), 0) + 1
    return codes


def fitted_losses(options: argparse.Namespace, bench: Bench) -> tuple[float, Agreement, Losses]:
    """Size of the noise that loses 1 %, how its predictions agree, each segment's loss in nats."""
    model, tokenizer = bench.original.model, bench.original.tokenizer
    context = bench.original.context(options.context)
    text = read_text(options.data[0])
    tokens = text_tokens(text, tokenizer, chosen_bos(None, tokenizer), context)
    more: dict[str, Any] = {"context": context, "max_tokens": options.max_tokens}
    reference = record_reference(model, tokens.ids, bos=tokens.bos, **more)
    base = np.array(reference.result.nll)

    def noisy(share: float) -> tuple[Agreement, Losses]:
        noisy = copy.deepcopy(model)
        with torch.no_grad():
            add_noise(noisy, share)
        meter = AgreementMeter(reference)
        result = perplexity(noisy, tokens.ids, on_logits=meter, bos=tokens.bos, **more)
        return meter.result(), np.array(result.nll) - base

    low, high = 0.0, 0.2
    while high - low > 2e-4:
        middle = (low + high) / 2
        agreement, losses = noisy(middle)
        low, high = (middle, high) if losses.mean() < LOSS else (low, middle)
    return middle, agreement, losses - losses.mean() + LOSS


class Draws:
    """Whole gates on segments drawn with replacement, limits exactly at what all segments have."""

    def __init__(self, policy: AccuracyPolicy, agreement: Agreement, losses: Losses) -> None:
        self._losses, self._agreement = losses, agreement
        self.plan = TestPlan(LOSS, policy.planned_alpha, policy.planned.power)
        self._alpha = policy.other_alpha
        limited = {key for limit in policy.of(KlLimit) for key in limit.bounds}
        limited |= {key for limit in policy.of(AgreementLimit) for key in limit.bounds}
        self._shares = [share for key, share in KL_QUANTILES.items() if key in limited]
        means = {"mean": agreement.kl, "top1": agreement.top1, "top5": agreement.top5}
        self._means = {key: np.array(v) for key, v in means.items() if key in limited}
        every = np.sort(agreement.token_kl, axis=None)
        self._quantiles = [every[math.ceil(share * every.size) - 1] for share in self._shares]

    def judge(self, seed: int, lost: float) -> tuple[bool, bool, int]:
        """Return whether the perplexity test fails, whether any limit does, and the segments taken.

        lost: nats a token added to each segment's loss.
        """
        rng = np.random.default_rng(seed)
        rows = rng.integers(self._losses.size, size=MIN_VALUES)
        decision = decide(self.plan, self._losses[rows] + lost, first=True)
        while decision is Decision.OPEN:
            more = rng.integers(self._losses.size, size=math.ceil((GROWTH - 1) * rows.size))
            rows = np.concatenate((rows, more))
            decision = decide(self.plan, self._losses[rows] + lost)
        above, taken = decision is Decision.ABOVE, rows.size
        # Of a text with as many segments as the losses, or as the test took.
        most, earlier = max(self._losses.size, rows.size), 0
        while True:
            fails, undecided = self._limits(rows, seed, (rows.size - earlier) / most)
            if not undecided or rows.size == most:
                return above, above or fails, taken
            earlier = rows.size
            added = min(most, math.ceil(GROWTH * earlier)) - earlier
            rows = np.concatenate((rows, rng.integers(self._losses.size, size=added)))

    def _limits(self, rows: NDArray[np.intp], seed: int, share: float) -> tuple[bool, bool]:
        """Return whether a limit fails, and whether one is ambiguous. share: see PowerSchedule."""
        count = rows.size
        found = [
            (mean_difference_interval(np.zeros(count), v[rows], seed=seed), float(v.mean()), key)
            for key, v in self._means.items()
        ]
        tokens = self._agreement.token_kl[rows]
        intervals = block_quantile_intervals(tokens, self._shares, seed=seed)
        found += [(i, float(b), "kl") for i, b in zip(intervals, self._quantiles, strict=True)]
        alpha = None if self._alpha is None else share * self._alpha
        outcomes = []
        for interval, bound, key in found:
            higher = key.startswith("top")
            end = far_end(interval, count, share, low=higher)
            beyond = interval.estimate < bound if higher else interval.estimate > bound
            fails = beyond and clearly_beyond(interval, bound, count, alpha)
            kept = not beyond and (end >= bound if higher else end <= bound)
            outcomes.append((fails, not fails and not kept))
        return any(fails for fails, _ in outcomes), any(open_ for _, open_ in outcomes)


def main() -> int:
    """Judge, fit, draw; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs=1)
    parser.add_argument("--policy", default="default")
    parser.add_argument("--gates", type=int, default=200)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default=best_device())
    options = parser.parse_args()
    bench = Bench(options, judged_policy(options))
    codes = equal_models(bench, options.gates)
    bench.close()
    rates = PlannedPower(detect=1.0)
    policy = dataclasses.replace(judged_policy(options), planned=rates)
    size, agreement, losses = fitted_losses(options, bench)
    gates = Draws(policy, agreement, losses)
    lossy = [gates.judge(seed, 0.0) for seed in range(options.draws)]
    equal = [gates.judge(seed, -LOSS) for seed in range(options.draws)]
    power = sum(above for above, _, _ in lossy) / options.draws
    alpha = sum(fails for _, fails, _ in equal) / options.draws
    caught = power >= rates.power - 3 * _error(rates.power, options.draws)
    few = alpha <= rates.alpha + 3 * _error(rates.alpha, options.draws)
    deviation = float(losses.std(ddof=1))
    found = {
        "equal_models_by_exit_code": codes,
        "noise_of_1_percent": size,
        "segments": losses.size,
        "deviation_of_segments": deviation,
        "segments_needed": int(gates.plan.needed(losses)),
        "segments_taken": float(np.mean([taken for _, _, taken in lossy + equal])),
        "draws": options.draws,
        "share_of_losses_caught": power,
        "planned_power": rates.power,
        "share_without_loss_failed": alpha,
        "share_without_loss_failed_by_perplexity": sum(a for a, _, _ in equal) / options.draws,
        "planned_alpha": rates.alpha,
        "planned_alpha_of_perplexity": gates.plan.alpha,
    }
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")
    right = set(codes) <= {str(int(ExitCode.PASS))} and caught and few
    return 0 if right else 1


def _error(share: float, draws: int) -> float:
    return math.sqrt(share * (1 - share) / draws)


if __name__ == "__main__":
    sys.exit(main())
