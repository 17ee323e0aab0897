"""Buffers of a GEMM: launches over copies of the weights, checked unannounced between samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flexq_bench.measure.buffers import Buffers
from flexq_bench.measure.check import judge_error, relative_error
from flexq_bench.measure.clocks import BetweenSamples
from flexq_bench.measure.rewriting import Contents, Rewriting, Slots, WeightCopies
from kernels.contract import Config, PackedOperand
from kernels.reference import Reference
from workloads.case import Case

_ALIGNED = 256  # elements between two outputs: 512 bytes, as the CUDA allocator aligns
_MIN_SLOTS, _MAX_SLOTS = 2, 256
_MAX_COLD_SLOTS = 8  # of activations; a cold sample has few turns over the weights
_LOOKS = 16  # samples of a placement whose outputs are kept
_JUDGED_AT_ONCE = 1 << 22  # elements

# launch(x, w, out, config)
Launch = Callable[[PackedOperand, PackedOperand, torch.Tensor, Config | None], None]


@dataclass(frozen=True, slots=True)
class _Look:
    """Who wrote the outputs of a sample: slots, and each one's content of X and of the weights."""

    slots: tuple[int, ...]
    activations: tuple[int, ...]
    weights: tuple[int, ...]


class LinearBuffers(Buffers, BetweenSamples):
    """Weights rotate launch by launch, activations turn by turn over the weights.

    A layer finds its input in the cache, where it was just written: there are few activations, and
    the launches of a turn share one. No launch of a sample has both the activations and the weights
    of another, as far as there are activations for it.

    Activations are rewritten before each sample and some weights before each batch, so whatever is
    left in an output is the result of other inputs. What the launches of some samples wrote is kept
    on the device and judged when the placement ends.

    seed: what changes is drawn from it; of a secret.
    """

    weights: WeightCopies

    def __init__(
        self,
        case: Case,
        weights: WeightCopies,
        launch: Launch,
        contents: Contents,
        reference: Reference,
        orders: tuple[torch.Tensor, ...],
        rewriting: Rewriting,
        *,
        seed: int,
        pad: torch.Tensor,
    ) -> None:
        self.weights = weights
        self._case, self._launch, self._contents = case, launch, contents
        self._reference, self._orders = reference, orders
        self._pad = pad  # held, so that the others don't get the addresses of the last placement
        self._draw = random.Random(seed)
        self._rewritten_bytes = rewriting.protocol.rewritten_bytes
        budget = rewriting.pool_bytes(case, weights[0].nbytes)
        self._place_activations(budget)
        self._place_outputs(budget)
        self._first = 0  # content that the first slot has
        self._is_announced = False
        self._plan: list[int] = []
        self._looks: list[_Look] = []
        self._looked_for = 0
        self._look_at: int | None = None
        self.begin_launches(len(self._outs))

    @property
    def between(self) -> BetweenSamples:
        return self

    def _place_activations(self, budget: int) -> None:
        inputs = self._contents.inputs
        most = _MAX_SLOTS if self.copies == 1 else _MAX_COLD_SLOTS
        count = _clamped(budget // Slots.bytes_each(inputs[0]), most)
        self._xs = Slots(inputs[0], count)
        # So long that the slots can be filled by one copy from any content on.
        self._bank = Slots(inputs[0], len(inputs) + count)
        self._bank.fill(inputs)
        self._xs.copy_from(self._bank, 0, count)
        self._used = count

    def _place_outputs(self, budget: int) -> None:
        m, n, device = self._case.gemm.m, self._case.gemm.n, self._reference.y.device
        stride = -(-m * n // _ALIGNED) * _ALIGNED
        count = _clamped(budget // (2 * stride), _MAX_SLOTS)
        self._memory = torch.randn(count, stride, device=device).half()  # as good as any result
        self._outs = [self._memory[i, : m * n].view(m, n) for i in range(count)]
        rows, columns = self._contents.rows, self._contents.columns
        of_one = (rows[:, None] * n + columns[None, :]).flatten()
        starts = torch.arange(count, device=device) * stride
        self._looked_at = (starts[:, None] + of_one[None, :]).flatten()
        self._kept = torch.empty(_LOOKS, len(self._looked_at), dtype=torch.float16, device=device)

    def begin_launches(self, count: int) -> None:
        """Choose which launch writes to which output, and forget who wrote before.

        Each output is looked at as its last launch leaves it. These launches are spread evenly over
        the sample, and the others write to an output that a later one writes to.
        """
        if count != len(self._plan):
            self._plan = self._planned(count)
        self._position = 0
        self._written: dict[int, tuple[int, int]] = {}
        self._used = min(len(self._xs), -(-count // self.copies))

    def _planned(self, count: int) -> list[int]:
        """Indices of outputs, one a launch."""
        outs = range(len(self._outs))
        last = sorted(self._draw.sample(range(count - 1), min(len(outs), count) - 1))
        last.append(count - 1)
        slots = self._draw.sample(outs, len(last))
        plan, passed = [], 0
        for position in range(count):
            if position == last[passed]:
                plan.append(slots[passed])
                passed += 1
            else:
                plan.append(slots[self._draw.randrange(passed, len(last))])
        return plan

    def launch(self, i: int, config: Config | None) -> None:
        position = self._position
        self._position = position + 1
        slot = self._plan[position % len(self._plan)]
        x = position // self.copies % self._used
        self._written[slot] = x, i
        self._launch(self._xs[x], self.weights[i], self._outs[slot], config)

    def begin_batch(self, count: int) -> None:
        if self._is_announced:
            return
        self._look_at = self._draw.randrange(count)
        # Copies whose results can be looked at come first.
        copies = sorted({copy for _, copy in self._written.values()}) or range(self.copies)
        most = max(1, self._rewritten_bytes // max(1, self.weights[0].nbytes))
        for copy in self._draw.sample(copies, min(len(copies), most)):
            self.weights.rewrite(copy)

    def before_sample(self) -> None:
        if self._is_announced:
            return
        count = len(self._contents.inputs)
        self._first = (self._first + self._draw.randrange(1, count)) % count
        self._xs.copy_from(self._bank, self._first, self._used)

    def after_sample(self, index: int) -> None:
        if self._is_announced or index != self._look_at:
            return
        # Every look of the placement is equally likely to be among those that are kept.
        place = len(self._looks)
        if place == _LOOKS:
            place = self._draw.randrange(self._looked_for + 1)
        self._looked_for += 1
        if place >= _LOOKS:
            return
        inputs = len(self._contents.inputs)
        look = _Look(
            slots=tuple(self._written),
            activations=tuple((self._first + x) % inputs for x, _ in self._written.values()),
            weights=tuple(self.weights.held[copy] for _, copy in self._written.values()),
        )
        self._looks[place : place + 1] = [look]
        torch.index_select(self._memory.view(-1), 0, self._looked_at, out=self._kept[place])

    def poison(self) -> None:
        self._is_announced = True
        self._xs.fill(self._contents.inputs[:1])
        self._memory.fill_(torch.nan)

    def inspect(self, config: Config | None, tolerance: float) -> str:
        unannounced = self._judge_looks(tolerance)
        announced = self._judge_announced(tolerance) if self._is_announced else ""
        self._is_announced = False
        return unannounced or announced

    def _judge_looks(self, tolerance: float) -> str:
        """Describe what is wrong with the outputs that were kept; empty: nothing."""
        known = self._contents.reference
        rows, columns = self._contents.rows, self._contents.columns
        kept = self._kept.view(_LOOKS, len(self._outs), len(rows), len(columns))
        if not self._looks:
            return ""
        y = torch.cat([kept[i, list(look.slots)] for i, look in enumerate(self._looks)])
        of = (
            [content for look in self._looks for content in look.weights],
            [content for look in self._looks for content in look.activations],
        )
        reference = replace(known, y=known.y[of], magnitude=known.magnitude[of])
        wrong = ~(relative_error(y, reference) <= tolerance)  # true for NaN
        if not bool(wrong.any()):
            return ""
        _, row, column = at = tuple(torch.nonzero(wrong)[0].tolist())
        return (
            f"timed launches are wrong on inputs that change in place between samples: "
            f"{int(wrong.sum()):,} of {wrong.numel():,} elements looked at unannounced, first "
            f"y[{int(rows[row])},{int(columns[column])}] = {float(y[at]):.6g}, expected "
            f"{float(reference.y[at]):.6g}"
        )

    def _judge_announced(self, tolerance: float) -> str:
        m, n = self._case.gemm.m, self._case.gemm.n
        orders = [order.to(self._memory.device) for order in self._orders]
        at_once = max(1, _JUDGED_AT_ONCE // (m * n))
        written = list(self._written.items())
        for start in range(0, len(written), at_once):
            part = written[start : start + at_once]
            y = torch.cat([self._outs[slot] for slot, _ in part])
            of = [orders[self.weights.held[copy]] for _, (_, copy) in part]
            reference = replace(
                self._reference,
                y=torch.cat([self._reference.y[:, order] for order in of]),
                magnitude=torch.cat([self._reference.magnitude[:, order] for order in of]),
            )
            detail = judge_error(y, reference, tolerance).detail
            if detail:
                return detail
        return ""


def _clamped(count: int, most: int) -> int:
    return max(_MIN_SLOTS, min(most, count))
