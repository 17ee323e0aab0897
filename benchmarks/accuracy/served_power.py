"""Error rates of `gate served`: simulated gates of stored answers, with and without a loss.

python benchmarks/accuracy/served_power.py [--draws 1000]

A gate asks 1,319 questions (as many as GSM8K has) in blocks, and judges accuracy, faulty answers
and nothing else. Both engines answer from tables: `greedy` with a share of questions whose answers
differ, `sampled` with 8 answers to each question, of its own difficulty.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flexq_bench.db.records import GateLimit
from flexq_bench.served.client import Answer, Client, Limits, Outcome
from flexq_bench.served.engines import RunningEngine
from flexq_bench.served.judging import judge_accuracy, judge_faults
from flexq_bench.served.paired import PairedSuite, ask_both, begin
from flexq_bench.served.questions import Asking, OnQuestion, QuestionSuite, Scored
from flexq_bench.served.turns import BASE, HEAD, Turns
from flexq_bench.stats.sequential_loss import LossTest

QUESTIONS = 1319
_ALPHA, _POWER = 0.01, 0.95  # of the default policy
_ORDER = ("fail", "not judged", "ambiguous", "pass")

Right = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Simulated:
    """Answers of two engines: [questions], the number of right samples; and faulty greedy ones."""

    right: dict[str, Right]
    samples: int = 1
    cut_off: float = 0.01


class StoredSuite(QuestionSuite):
    """Answers by engine; a part is cut off, at random."""

    name, metric, data_hash = "stored", "right", ""

    def __init__(self, stored: Simulated, rng: np.random.Generator) -> None:
        self.count = stored.right[BASE].size
        self._stored = stored
        self._cut = {name: rng.random(self.count) < stored.cut_off for name in (BASE, HEAD)}

    async def ask(
        self, client: Client, indices: Sequence[int], asking: Asking, on_question: OnQuestion
    ) -> list[Scored]:
        right, cut = self._stored.right[client.url], self._cut[client.url]
        return [
            Scored(
                right[i] / asking.samples,
                (Answer(Outcome.CUT_OFF if cut[i] else Outcome.OK),) * asking.samples,
            )
            for i in indices
        ]


class _StoredTurns:
    def engine(self, name: str) -> RunningEngine:
        return RunningEngine(name, name, "stored", 0.0, lambda: "")

    def place(self, block: int) -> None:
        """Stored answers have no place."""

    def order(self, block: int) -> tuple[str, str]:
        return (BASE, HEAD)


def greedy(rng: np.random.Generator, lost: float, won: float, score: float = 0.6) -> Simulated:
    """Draw answers of which these shares are right in one engine only."""
    place = rng.random(QUESTIONS)
    base = rng.random(QUESTIONS) < score
    head = base.copy()
    base[place < lost], head[place < lost] = True, False
    gained = (place >= lost) & (place < lost + won)
    base[gained], head[gained] = False, True
    return Simulated({BASE: base.astype(np.int64), HEAD: head.astype(np.int64)})


def sampled(rng: np.random.Generator, loss: float, samples: int = 8) -> Simulated:
    """Draw samples of questions whose difficulties are between easy and hard."""
    chance = rng.beta(0.5, 0.5, QUESTIONS)
    worse = chance * (1 - loss / 0.5)  # a mean of 0.5
    right = {BASE: rng.binomial(samples, chance), HEAD: rng.binomial(samples, worse)}
    return Simulated(right, samples)


def simulated_gate(stored: Simulated, *, seed: int) -> tuple[list[GateLimit], int]:
    """Return the limits of a gate on stored answers, and the questions that it took."""
    rng = np.random.default_rng(seed)
    asking = Asking(samples=stored.samples, temperature=float(stored.samples > 1))
    test = LossTest(0.03, 0.0, 0.9 * _ALPHA, _POWER)
    faults = LossTest(0.02, 0.0, 0.1 * _ALPHA / 4, _POWER)
    answers = begin(PairedSuite(StoredSuite(stored, rng), asking, test, faults), seed=seed)
    ask_both(cast(Turns, _StoredTurns()), answers, limits=Limits())
    return [judge_accuracy(answers), *judge_faults(answers)], len(answers.both)


def verdict(limits: Sequence[GateLimit]) -> str:
    """Return the worst outcome."""
    return min((limit.outcome for limit in limits), key=_ORDER.index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    draws = parser.parse_args().draws
    rng = np.random.default_rng(62)
    kinds: dict[str, Callable[[], Simulated]] = {
        "equal, greedy, 2 % discordant": lambda: greedy(rng, 0.01, 0.01),
        "equal, greedy, 8 % discordant": lambda: greedy(rng, 0.04, 0.04),
        "equal, 8 samples": lambda: sampled(rng, 0.0),
        "3 points lost, 8 % discordant": lambda: greedy(rng, 0.055, 0.025),
        "3 points lost, 8 samples": lambda: sampled(rng, 0.03),
    }
    for kind, draw in kinds.items():
        gates = [simulated_gate(draw(), seed=seed) for seed in range(draws)]
        counts = Counter(verdict(limits) for limits, _ in gates)
        taken = np.mean([count for _, count in gates])
        shares = ", ".join(f"{counts[o] / draws:.2%} {o}" for o in _ORDER if counts[o])
        print(f"{kind}: {shares}; {taken:.0f} questions")  # noqa: T201


if __name__ == "__main__":
    main()
