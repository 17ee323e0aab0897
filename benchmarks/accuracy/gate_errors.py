"""Errors of the accuracy gate on a real model: equal ones that fail, and losses that pass.

    python benchmarks/accuracy/gate_errors.py --model DIR --data FILE [--gates 200] [--draws 1000]
        [--policy default] [--context 256] [--max-tokens 8000]

First the gate judges copies of the model that compute the same in another order: the channels of
each feed-forward are permuted, seeded, which changes the order of every reduction over them, and
1 to 8 segments are computed together, where the original's are computed as the gate does. None may
fail. Then noise of a fitted size makes a model that loses exactly 1 % of the perplexity on the
text. Its segments' losses are drawn with replacement, a gate's worth at a time, and the share of
draws that a policy with `detect = 1` catches is compared with its power; the same with the loss
taken away, with its alpha. Prints one JSON object; ends with exit code 1 if an equal model failed,
the power is further from the plan than three standard errors, or alpha further above it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
from typing import Any

import numpy as np
import torch
from corruptions import NOTHING, Bench, add_noise, judged_policy
from numpy.typing import NDArray

from ci.accuracy_policy import PlannedPower
from ci.accuracy_power import PILOT
from flexq_bench.accuracy import FULL_PRECISION, read_text
from flexq_bench.accuracy.bos import chosen_bos, text_tokens
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.setup import best_device
from flexq_bench.exit_codes import ExitCode
from flexq_bench.stats import Decision, GroupSequentialTest, TestPlan

MOST_TOGETHER = 8  # segments
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


def equal_models(bench: Bench, gates: int) -> dict[str, int]:
    """Number of gates by exit code, on models that are equal to the original."""
    codes: dict[str, int] = {}
    same = dataclasses.replace(NOTHING, name="same", damage=permute_channels)
    for seed in range(gates):
        report, _ = bench.judge(same, seed, FULL_PRECISION, at_once=1 + seed % MOST_TOGETHER)
        codes[str(int(report.exit_code))] = codes.get(str(int(report.exit_code)), 0) + 1
    return codes


def fitted_losses(options: argparse.Namespace, bench: Bench) -> tuple[float, NDArray[np.float64]]:
    """Size of the noise that loses 1 %, and each segment's loss in nats a token."""
    model, tokenizer = bench.original.model, bench.original.tokenizer
    context = bench.original.context(options.context)
    bos = chosen_bos(None, tokenizer)
    tokens = text_tokens(read_text(options.data), tokenizer, bos, context)

    def losses(share: float) -> NDArray[np.float64]:
        noisy = copy.deepcopy(model)
        with torch.no_grad():
            add_noise(noisy, share)
        result = perplexity(
            noisy, tokens.ids, context=context, max_tokens=options.max_tokens, bos=tokens.bos
        )
        return np.array(result.nll)

    base, low, high = losses(0.0), 0.0, 0.2
    found = base
    while high - low > 1e-4:
        middle = (low + high) / 2
        found = losses(middle) - base
        low, high = (middle, high) if found.mean() < LOSS else (low, middle)
    return middle, found - found.mean() + LOSS


def share_caught(losses: NDArray[np.float64], plan: TestPlan, draws: int) -> float:
    """Of draws with replacement, each looked at as the gate does."""
    caught = 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        values, test = rng.choice(losses, PILOT), GroupSequentialTest(plan)
        while (decision := test.look(values)) is Decision.OPEN:
            more = max(1, math.ceil(plan.needed(float(values.std(ddof=1))) / 5))
            values = np.concatenate((values, rng.choice(losses, more)))
        caught += decision is Decision.ABOVE
    return caught / draws


def main() -> int:
    """Judge, fit, draw; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--data"):
        parser.add_argument(name, required=True)
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
    size, losses = fitted_losses(options, bench)
    rates = PlannedPower(detect=1.0)
    plan = TestPlan(LOSS, rates.alpha, rates.power)
    power = share_caught(losses, plan, options.draws)
    alpha = share_caught(losses - LOSS, plan, options.draws)
    near = abs(power - rates.power) <= 3 * _error(rates.power, options.draws)
    few = alpha <= rates.alpha + 3 * _error(rates.alpha, options.draws)
    found = {
        "equal_models_by_exit_code": codes,
        "noise_of_1_percent": size,
        "deviation_of_segments": float(losses.std(ddof=1)),
        "segments_needed": plan.needed(float(losses.std(ddof=1))),
        "draws": options.draws,
        "share_of_losses_caught": power,
        "planned_power": rates.power,
        "share_of_equal_models_failed": alpha,
        "planned_alpha": rates.alpha,
    }
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")
    right = set(codes) <= {str(int(ExitCode.PASS))} and near and few
    return 0 if right else 1


def _error(share: float, draws: int) -> float:
    return math.sqrt(share * (1 - share) / draws)


if __name__ == "__main__":
    sys.exit(main())
