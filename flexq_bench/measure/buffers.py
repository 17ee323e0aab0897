"""One placement: all buffers of a launch at fresh addresses, with unannounced checks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from flexq_bench.kernels.contract import Config, PackedOperand, Probe
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import Reference
from flexq_bench.measure import tampering
from flexq_bench.measure.activation_rotation import Contents, Rewriting, Slots, stage_input
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import judge_error, relative_error
from flexq_bench.measure.clocks import BetweenSamples, draw_kept
from flexq_bench.measure.inputs import LinearInputs
from flexq_bench.measure.weight_rotation import Content, WeightCopies, first_change

# Activations of launches: those of the timed samples, ones that no launch has seen, or no others.
Draw = Literal["timed", "new", "same"]

_PAD_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
_MIN_SLOTS, _MAX_SLOTS = 2, 256
_MAX_COLD_SLOTS = 8  # of activations; a cold sample makes few passes over the weights
_KEPT_SAMPLES = 16  # samples of a placement whose outputs are kept, at most
_KEPT_LAUNCHES = 16  # of such a sample
# Contents of the weights whose launches are judged, of those of a placement's kept outputs.
_JUDGED_CONTENTS = 64

# launch(x, w, out, config)
Launch = Callable[[PackedOperand, PackedOperand, torch.Tensor, Config | None], None]


class Buffers(ABC):
    """Copies of the weights at fresh addresses, and the other buffers of a launch."""

    weights: Sequence[PackedOperand]

    @property
    def copies(self) -> int:
        return len(self.weights)

    @property
    @abstractmethod
    def between(self) -> BetweenSamples:
        """The hooks that run between samples."""

    @abstractmethod
    def launch(self, i: int, config: Config | None) -> None:
        """Launch once on copy i."""

    def bound(self, config: Config | None) -> Callable[[int], None]:
        """`launch` with the configuration bound."""
        return lambda i: self.launch(i, config)

    @abstractmethod
    def poison(self) -> None:
        """Fill the output with values that no correct launch produces, for one sample."""

    @abstractmethod
    def inspect(self, config: Config | None, tolerance: float) -> str:
        """Describe errors of outputs; empty: none.

        The outputs are those of the launches since `poison`, and those of unannounced samples.
        """

    @contextmanager
    def unseen_inputs(self) -> Iterator[UnseenInputs | None]:
        """Give each of a few launches new activations within this context; None: not possible."""
        yield None

    def fill(self, inputs: LinearInputs, config: Config | None, *, weights: bool) -> None:
        """Use these activations in the last sample of each batch from now on.

        weights: also write the weights into the copy that the last launch of a sample reads. All
        other launches keep their inputs, so that no launch repeats the work of another one. Raises
        ValueError if these buffers have no inputs.
        """
        raise ValueError("these buffers have no inputs that can be given")

    def output(self) -> torch.Tensor:
        """FP16 [M,N], as the latest launch left it. Raises ValueError if there is none."""
        raise ValueError("these buffers have no output")


@dataclass(frozen=True, slots=True)
class _Kept:
    """Inputs of the launches whose outputs are kept: the content of X, and W."""

    activations: tuple[int, ...]
    weights: tuple[Operand, ...]


class LinearBuffers(Buffers, BetweenSamples):
    """Weights rotate from launch to launch, activations from one pass over the weights to the next.

    A layer finds its input in the cache, where it was just written. Therefore there are few
    activations, and the launches of a pass share one. No two launches of a sample have the same
    activations and weights, as long as there are enough activations.

    All launches write to one output, which stays in the cache as a layer's output does. Activations
    are rewritten before each sample and some weights before each batch, so before a launch the
    output contains the result of other inputs. In untimed samples, one per batch on average,
    elements of the output are copied after randomly drawn launches, and checked at the end of the
    placement.

    reference: of the first activations and the first content of the weights, which is `first_w`.
    seed: derived from a secret; all changes are drawn from it.
    """

    weights: WeightCopies

    def __init__(
        self,
        bound: BoundKernel,
        weights: WeightCopies,
        launch: Launch,
        contents: Contents,
        reference: Reference,
        first_w: Content,
        rewriting: Rewriting,
        *,
        seed: int,
        pad: torch.Tensor,
    ) -> None:
        self.weights = weights
        self._bound = bound
        self._launch, self._contents = launch, contents
        self._reference, self._first_w = reference, first_w
        self._pad = pad  # kept, so that the buffers don't get the addresses of the last placement
        self._draw = random.Random(seed)
        self._rewritten_bytes = rewriting.protocol.rewritten_bytes
        budget = rewriting.pool_bytes(bound.case, weights[0].nbytes)
        self._place_activations(budget)
        self._place_output(seed)
        self._first = 0  # content of the first slot
        self._is_announced = False
        # True if each launch has its own activations and only one result is judged
        self._is_unseen = False
        # Given inputs, for which the result of a batch's last launch is judged: activations of
        # the last sample, weights, and the copy that has them. None: none are given.
        self._given_x: Slots | None = None
        self._given_w: Content | None = None
        self._given_copy: int | None = None
        self._displaced = first_w  # content of that copy before
        self._written = ""
        self._last_copy = 0
        # X, and the copy of W, of launches whose outputs are copied
        self._of_kept: list[tuple[int, int]] = []
        self._kept: list[_Kept] = []
        self._kept_in_all = 0
        self._to_keep: int | None = None  # samples of the next batch; None: their number is drawn
        self._kept_before: Counter[int] = Counter()
        self.begin_launches(1)

    @property
    def between(self) -> BetweenSamples:
        return self

    def _place_activations(self, budget: int) -> None:
        inputs = self._contents.inputs
        most = _MAX_SLOTS if self.copies == 1 else _MAX_COLD_SLOTS
        count = max(_MIN_SLOTS, min(most, budget // Slots.bytes_each(inputs[0])))
        self._xs = Slots(inputs[0], count)
        # Long enough that one copy fills the slots, starting at any content.
        self._bank = Slots(inputs[0], len(inputs) + count)
        self._bank.fill(inputs)
        self._xs.copy_from(self._bank, 0, count)
        self._filled = self._bank, 0, count  # so many slots have these contents, from the first on

    def _place_output(self, seed: int) -> None:
        m, n, device = self._bound.gemm.m, self._bound.gemm.n, self._reference.y.device
        # The default generator is the kernel's. Noise is no correct result.
        generator = torch.Generator(device).manual_seed(seed)
        self._out = torch.randn(
            m, n, generator=generator, device=device, dtype=torch.float32
        ).half()
        # Attributes that a kernel sets on its tensor object do not affect ours.
        self._lent_out = self._out.detach()
        rows, columns = self._contents.rows, self._contents.columns
        self._elements = (rows[:, None] * n + columns[None, :]).flatten()
        size = len(self._elements)
        self._copied = torch.empty(_KEPT_LAUNCHES, size, dtype=torch.float16, device=device)
        self._kept_outputs = torch.empty(
            _KEPT_SAMPLES, _KEPT_LAUNCHES, size, dtype=torch.float16, device=device
        )

    @property
    def keeps_outputs(self) -> bool:  # type: ignore[override]
        return True

    def captures_kept_first(self) -> bool:
        return self._draw.random() < 0.5

    def begin_launches(self, count: int) -> None:
        self._position = 0
        self._used = min(len(self._xs), -(-count // self.copies))
        # The outputs of these launches are copied if the sample is a kept one.
        self._positions = self._draw.sample(range(count), min(count, _KEPT_LAUNCHES))

    def launch(self, i: int, config: Config | None) -> None:
        if self._is_unseen:
            self._last_x = self._position % len(self._xs)
        else:
            self._last_x = self._position // self.copies % self._used
        self._last_copy = i
        self._position += 1
        self._launch(self._xs[self._last_x], self.weights[i], self._lent_out, config)

    def after_launch(self) -> None:
        if self._position == 1:
            self._of_kept.clear()
        if self._position - 1 in self._positions:
            tampering.note_active()
            kept = self._copied[len(self._of_kept)]
            torch.index_select(self._out.view(-1), 0, self._elements, out=kept)
            self._of_kept.append((self._last_x, self._last_copy))

    def begin_batch(self, count: int) -> None:
        if self._is_announced:
            return
        kept = draw_kept(self._draw) if self._to_keep is None else self._to_keep
        self._to_keep = None
        # Kept and timed samples are in any order that ends with a timed one.
        places = sorted(self._draw.sample(range(kept + count - 1), kept))
        self._kept_before = Counter(place - before for before, place in enumerate(places))
        # Copies whose results can be kept come first.
        copies = sorted({copy for _, copy in self._of_kept}) or range(self.copies)
        copies = [copy for copy in copies if copy != self._given_copy]
        most = max(1, self._rewritten_bytes // max(1, self.weights[0].nbytes))
        for copy in self._draw.sample(copies, min(len(copies), most)):
            self.weights.rewrite(copy)

    def before_sample(self, *, last_copy: int | None = None) -> None:
        if self._is_announced:
            return
        if last_copy is not None and self._given_x is not None:
            self._filled = self._given_x, 0, self._used
            self._give_weights(last_copy)
        else:
            count = len(self._contents.inputs)
            self._first = (self._first + self._draw.randrange(1, count)) % count
            self._filled = self._bank, self._first, self._used
        self._xs.copy_from(*self._filled)

    def keep_samples(self, count: int) -> None:
        self._to_keep = count

    def kept_before(self, index: int) -> int:
        return 0 if self._is_announced else self._kept_before[index]

    def after_kept_sample(self) -> None:
        # Reservoir sampling: every such sample of the placement is kept with equal probability.
        place = len(self._kept)
        if place == _KEPT_SAMPLES:
            place = self._draw.randrange(self._kept_in_all + 1)
        self._kept_in_all += 1
        if place >= _KEPT_SAMPLES:
            return
        inputs = len(self._contents.inputs)
        kept = _Kept(
            activations=tuple((self._first + x) % inputs for x, _ in self._of_kept),
            weights=tuple(self.weights.current[copy].operand for _, copy in self._of_kept),
        )
        self._kept[place : place + 1] = [kept]
        self._kept_outputs[place].copy_(self._copied)

    def poison(self) -> None:
        self._written = self._changed()
        self._is_announced = True
        self._filled = self._all_slots(self._contents.inputs[0]), 0, len(self._xs)
        self._xs.copy_from(*self._filled)
        for copy in range(self.copies):
            self.weights.set_content(copy, self._first_w)
        self._out.fill_(torch.nan)

    def inspect(self, config: Config | None, tolerance: float) -> str:
        written = self._changed()
        unannounced = self._judge_kept(tolerance)
        announced = (
            judge_error(self._out, self._reference, tolerance).detail if self._is_announced else ""
        )
        self._is_announced = False
        return written or unannounced or announced

    def _changed(self) -> str:
        """Name an operand that launches changed although they must not; empty: none."""
        if self._written:
            return self._written
        read_only = self._bound.kernel.read_only()
        if self._bound.case.stage == "linear":
            read_only |= {"x"}
        if "x" in read_only:
            bank, first, count = self._filled
            for i in range(count):
                if buffer := first_change(self._xs[i], bank[first + i]):
                    return _written("x", buffer)
        if "w" in read_only:
            for i in range(self.copies):
                if buffer := self.weights.changed(i):
                    return _written("w", buffer)
        return ""

    def fill(self, inputs: LinearInputs, config: Config | None, *, weights: bool) -> None:
        self._given_x = self._all_slots(stage_input(self._bound, inputs))
        if weights:
            packed = self._bound.kernel.pack_weight(inputs.w.clone())
            self._given_w = Content(inputs.w, self._bound.kernel.narrow(packed, config))

    def _give_weights(self, copy: int) -> None:
        """Write the given weights into a copy; the one that had them gets others back."""
        if self._given_w is None or self.weights.current[copy] is self._given_w:
            return
        if self._given_copy is not None:
            self.weights.set_content(self._given_copy, self._displaced)
        self._given_copy, self._displaced = copy, self.weights.current[copy]
        self.weights.set_content(copy, self._given_w)

    def _all_slots(self, x: PackedOperand) -> Slots:
        """Slots for all launches with the same activations."""
        slots = Slots(x, len(self._xs))
        slots.fill([x])
        return slots

    @contextmanager
    def unseen_inputs(self) -> Iterator[UnseenInputs | None]:
        self._written = self._changed()
        self._is_unseen = True
        try:
            yield UnseenInputs(self)
        finally:
            self._is_unseen = False
            self._xs.copy_from(*self._filled)

    def output(self) -> torch.Tensor:
        return self._out

    def _judge_kept(self, tolerance: float) -> str:
        """Describe errors of the kept outputs; empty: none."""
        if not self._kept:
            return ""
        rows, columns = self._contents.rows, self._contents.columns
        outputs = self._kept_outputs.view(_KEPT_SAMPLES, _KEPT_LAUNCHES, len(rows), len(columns))
        y = torch.cat([outputs[i, : len(kept.weights)] for i, kept in enumerate(self._kept)])
        weights = [w for kept in self._kept for w in kept.weights]
        activations = [content for kept in self._kept for content in kept.activations]
        contents = list({id(w): w for w in weights}.values())
        judged = {id(w) for w in self._draw.sample(contents, min(len(contents), _JUDGED_CONTENTS))}
        places = [i for i, w in enumerate(weights) if id(w) in judged]
        return self._judge(
            y[places], [weights[i] for i in places], [activations[i] for i in places], tolerance
        )

    def judge_unseen(self, tolerance: float) -> str:
        """Describe errors of the latest launch, on the unseen activations; empty: none."""
        rows, columns = self._contents.rows, self._contents.columns
        y = self._out[rows[:, None], columns][None]
        w = self.weights.current[self._last_copy].operand
        return self._judge(y, [w], [len(self._contents.inputs)], tolerance)

    def _judge(
        self, y: torch.Tensor, weights: list[Operand], activations: list[int], tolerance: float
    ) -> str:
        """Describe errors of y, [launches, rows, columns], by the contents of the launches."""
        rows, columns = self._contents.rows, self._contents.columns
        reference = self._contents.reference(weights, activations)
        wrong = ~(relative_error(y, reference) <= tolerance)  # true for NaN
        if not bool(wrong.any()):
            return ""
        _, row, column = place = tuple(torch.nonzero(wrong)[0].tolist())
        return (
            f"launches are wrong on inputs that change in place between samples: "
            f"{int(wrong.sum()):,} of {wrong.numel():,} elements looked at unannounced, first "
            f"y[{int(rows[row])},{int(columns[column])}] = {float(y[place]):.6g}, expected "
            f"{float(reference.y[place]):.6g}"
        )


class UnseenInputs:
    """Activations of the next launches, one operand each, drawn from the contents of the bank.

    For new ones the elements of each buffer are rolled: bytes of the same distribution. launches:
    number of launches with operands of their own.
    """

    def __init__(self, buffers: LinearBuffers) -> None:
        self._buffers = buffers
        self._elsewhere = Slots(buffers._bank[0], len(buffers._xs))
        self.launches = len(buffers._xs)

    def draw(self, draw: Draw) -> None:
        """Write activations, and start again with the first launch.

        Where launches keep the same ones, others are written elsewhere, which takes as long.
        """
        buffers, lots = self._buffers, self._buffers._draw
        slots = self._elsewhere if draw == "same" else buffers._xs
        for i in range(len(slots)):
            content = buffers._bank[lots.randrange(len(buffers._bank))]
            for name, buffer in slots[i].buffers.items():
                values = content.buffers[name].flatten()
                shift = lots.randrange(1, max(2, len(values)))
                buffer.copy_(values.roll(0 if draw == "timed" else shift).view_as(buffer))
        buffers._position = 0

    def draw_known(self, launches: int) -> None:
        """Give the last of so many launches other unseen activations, whose result is known."""
        slots = self._buffers._xs
        slots[(launches - 1) % len(slots)].copy_from(self._buffers._contents.unseen)

    def wrong(self, tolerance: float) -> str:
        """Describe errors of the latest launch, which had these activations; empty: none."""
        return self._buffers.judge_unseen(tolerance)


class ProbeBuffers(Buffers):
    def __init__(self, probe: Probe, operands: list[PackedOperand], pad: torch.Tensor) -> None:
        self._probe, self.weights, self._pad = probe, operands, pad

    @property
    def between(self) -> BetweenSamples:
        """No hooks: a probe is ours, and its bytes have no meaning."""
        return BetweenSamples()

    def launch(self, i: int, config: Config | None) -> None:
        self._probe.launch(self.weights[i], config)

    def poison(self) -> None:
        """Nothing to do: a probe's own check poisons its output."""

    def inspect(self, config: Config | None, tolerance: float) -> str:
        result = self._probe.check(self.weights[-1], config)
        return "" if result.exact else f"wrong on the timed buffers: {result.detail}"


def random_pad(device: torch.device, seed: int) -> torch.Tensor:
    """A block of random size, which shifts the addresses of later allocations."""
    generator = torch.Generator().manual_seed(seed)
    most = _PAD_BYTES[device.type]
    size = int(torch.randint(1, most, (), generator=generator, device="cpu"))
    return torch.empty(size, dtype=torch.uint8, device=device)


def _written(operand: str, buffer: str) -> str:
    """Format the error for an operand that a launch changed, with the name of its argument."""
    name = operand if buffer in ("values", "real") else f"{operand}_{buffer}"
    return f"launches write into {name}: only out is theirs to write"
