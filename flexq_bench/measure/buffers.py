"""One placement: all buffers of a launch at fresh addresses, with unannounced checks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from flexq_bench.kernels.contract import Config, PackedOperand, Probe
from flexq_bench.measure.activation_rotation import Activations, Slots
from flexq_bench.measure.clocks import BetweenSamples
from flexq_bench.measure.kept_outputs import KeptOutputs
from flexq_bench.measure.weight_rotation import Content, WeightCopies
from flexq_bench.measure.work import KeptLaunches, Outputs, Work

# Activations of launches: those of the timed samples, ones that no launch has seen, or no others.
Draw = Literal["timed", "new", "same"]

_MAX_EXCHANGED_BYTES = 8 << 20  # of unseen streamed inputs, of one copy at least
_PAD_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


class Buffers(ABC):
    """Copies of the weights at fresh addresses, and the other buffers of a launch.

    failed: indices of the activations and the weights of a launch that was wrong; -1 and less: of
    given weights, in their order. None: not known.
    """

    weights: Sequence[PackedOperand]
    failed: tuple[int, int] | None = None

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

    def fill(self, inputs: Any, config: Config | None, *, weights: bool) -> None:
        """Use these activations in the last sample of each batch from now on.

        weights: also write the weights into the copy that the last launch of a sample reads. All
        other launches keep their inputs, so that no launch repeats the work of another one. Raises
        ValueError if these buffers have no inputs.
        """
        raise ValueError("these buffers have no inputs that can be given")

    def launch_again(self, x: int, w: int, config: Config | None, tolerance: float) -> str:
        """Launch on inputs of which a launch was wrong; describe errors, empty: none.

        x, w: see failed; given weights are the latest. Raises ValueError if these buffers have no
        inputs.
        """
        raise ValueError("these buffers have no inputs that can be given")

    def outputs(self) -> Outputs:
        """The outputs by name, as the latest launch left them. Raises ValueError: there is none."""
        raise ValueError("these buffers have no output")


class RotatingBuffers(Buffers, BetweenSamples):
    """Weights rotate from launch to launch, activations from one pass over the weights to the next.

    A layer finds its input in the cache, where it was just written. Therefore there are few
    activations, and the launches of a pass share one. No two launches of a sample have the same
    activations and weights, as long as there are enough activations.

    All launches write to one output, which stays in the cache as a layer's output does. Activations
    are rewritten before each sample and some weights before each batch, so before a launch the
    output contains the result of other inputs. In untimed samples, one per batch on average,
    elements of the output are copied after randomly drawn launches, and checked at the end of the
    placement.

    first: the content of the weights of announced checks. budget: most bytes of the activations
    of a sample. rewritten_bytes: of weights, before a batch. seed: derived from a secret; all
    changes are drawn from it.
    """

    weights: WeightCopies

    def __init__(
        self,
        work: Work,
        weights: WeightCopies,
        first: Content,
        *,
        budget: int,
        rewritten_bytes: int,
        seed: int,
        pad: torch.Tensor,
    ) -> None:
        self._work, self.weights, self._first_w = work, weights, first
        self._pad = pad  # kept, so that the buffers don't get the addresses of the last placement
        self._draw = random.Random(seed)
        self._rewritten_bytes = rewritten_bytes
        self._xs = Activations(work.inputs, copies=self.copies, budget=budget)
        # The default generator is the kernel's.
        device = next(iter(work.elements.values())).device
        self._out = work.allocate(torch.Generator(device).manual_seed(seed))
        # Attributes that a kernel sets on its tensor objects do not affect ours.
        self._lent_out = {name: out.detach() for name, out in self._out.items()}
        # Outputs that the latest launch of a timed sample returned, and of the one before it.
        self._returned: Outputs | None = None
        self._returned_before: Outputs | None = None
        self._kept = KeptOutputs(work.elements, self._out, self._draw)
        self._is_announced = False
        self._updated_buffers = self._work.updated & first.packed.buffers.keys()
        self._updated_copies: set[int] = set()
        self._is_on_host = device.type == "cpu"
        # True if each launch has its own activations and only one result is judged
        self._is_unseen = False
        # Given inputs, for which the result of a batch's last launch is judged: activations of
        # the last sample, weights, and the copy that has them. None: none are given.
        self._given_x: Slots | None = None
        self._given_w: Content | None = None
        self._given_copy: int | None = None
        self._given = 0  # number of weights given so far
        self._displaced = first  # content of that copy before
        self._written = ""
        self._last_copy = 0
        self.begin_launches(1)

    @property
    def between(self) -> BetweenSamples:
        return self

    @property
    def keeps_outputs(self) -> bool:  # type: ignore[override]
        return True

    def captures_kept_first(self) -> bool:
        return self._draw.random() < 0.5

    def begin_launches(self, count: int) -> None:
        self._position = 0
        self._xs.use(count)
        self._kept.begin_launches(count)

    def launch(self, i: int, config: Config | None) -> None:
        if self._is_unseen:
            self._last_x = self._position % len(self._xs.slots)
        else:
            self._last_x = self._xs.slot(self._position)
        self._last_copy = i
        self._position += 1
        # Without a reference, memory of the launches before can be used again.
        self._returned_before = self._returned
        self._returned = self._work.launch(
            self._xs.slots[self._last_x], self.weights[i], self._lent_out, config
        )

    def bound(self, config: Config | None) -> Callable[[int], None]:
        if not self._work.updated:
            return super().bound(config)

        def launch(i: int) -> None:
            self._updated_copies.add(i)
            self.launch(i, config)

        return launch

    def after_launch(self) -> None:
        self._kept.after_launch(self._position - 1, self.outputs(), self._last_x, self._last_copy)
        # A graph of kept samples has results of its own.
        self._returned = self._returned_before

    def begin_batch(self, count: int) -> None:
        if self._is_announced:
            return
        self._kept.begin_batch(count)
        # Copies whose results can be kept come first.
        copies = sorted({copy for _, copy in self._kept.launches}) or range(self.copies)
        copies = [copy for copy in copies if copy != self._given_copy]
        most = max(1, self._rewritten_bytes // max(1, self.weights[0].nbytes))
        for copy in self._draw.sample(copies, min(len(copies), most)):
            self.weights.rewrite(copy)

    def before_sample(self, *, last_copy: int | None = None) -> None:
        if self._work.updated:
            self.weights.restore(self._updated_copies, self._updated_buffers)
            if self._is_on_host:  # others replay the same launches
                self._updated_copies.clear()
        if self._is_announced:
            return
        if last_copy is not None and self._given_x is not None:
            self._xs.give(self._given_x)
            self._give_weights(last_copy)
        else:
            self._xs.rewrite(self._draw)

    def keep_samples(self, count: int) -> None:
        self._kept.keep_samples(count)

    def kept_before(self, index: int) -> int:
        return 0 if self._is_announced else self._kept.before(index)

    def after_kept_sample(self) -> None:
        self._kept.after_sample(self._xs.content, self.weights.current)

    def poison(self) -> None:
        self._written = self._changed()
        self._is_announced = True
        self._xs.give_first()
        for copy in range(self.copies):
            self.weights.set_content(copy, self._first_w)
        for name, out in self.outputs().items():
            if name not in self._work.updated:
                poison(out)

    def inspect(self, config: Config | None, tolerance: float) -> str:
        written = self._changed()
        kept = self._kept.all()
        unannounced = "" if kept is None else self._judge(kept, tolerance)
        announced = self._work.judge(self.outputs(), tolerance) if self._is_announced else ""
        self._is_announced = False
        return written or unannounced or announced

    def _changed(self) -> str:
        """Name an operand that launches changed although they must not; empty: none."""
        if self._written:
            return self._written
        read_only = self._work.read_only
        if "x" in read_only and (buffer := self._xs.changed()):
            return _written("x", buffer)
        if "w" in read_only:
            for i in range(self.copies):
                if buffer := self.weights.changed(i, self._work.updated):
                    return _written("w", buffer)
        return ""

    def fill(self, inputs: Any, config: Config | None, *, weights: bool) -> None:
        self._given_x = self._xs.everywhere(self._work.stage(inputs))
        if weights:
            self._given_w = replace(self._work.content(inputs, config), given=self._given)
            self._given += 1

    def _give_weights(self, copy: int) -> None:
        """Write the given weights into a copy; the one that had them gets others back."""
        if self._given_w is None or self.weights.current[copy] is self._given_w:
            return
        if self._given_copy is not None:
            self.weights.set_content(self._given_copy, self._displaced)
        self._given_copy, self._displaced = copy, self.weights.current[copy]
        self.weights.set_content(copy, self._given_w)

    @contextmanager
    def unseen_inputs(self) -> Iterator[UnseenInputs | None]:
        self._written = self._changed()
        if self._work.updated:  # repeated launches would go on from their own results
            yield None
            return
        self._is_unseen = True
        unseen = UnseenInputs(self)
        try:
            yield unseen
        finally:
            self._is_unseen = False
            self._xs.restore()
            unseen.restore_streamed()

    def outputs(self) -> Outputs:
        return self._out if self._returned is None else self._returned

    def judge_unseen(self, tolerance: float) -> str:
        """Describe errors of the latest launch, on the unseen activations; empty: none."""
        return self._judge_latest(
            self.weights.current[self._last_copy], self._xs.contents, tolerance
        )

    def launch_again(self, x: int, w: int, config: Config | None, tolerance: float) -> str:
        content = self.weights.contents[w] if w >= 0 else self._given_w
        if content is None:
            raise ValueError("no weights are given")
        self.weights.set_content(0, content)
        unseen = self._work.unseen
        self._xs.give(self._xs.everywhere(unseen if x == self._xs.contents else self._xs.bank[x]))
        self._position = 0
        self.launch(0, config)
        return self._judge_latest(content, x, tolerance)

    def _judge_latest(self, w: Content, x: int, tolerance: float) -> str:
        """Describe errors of the latest launch, on these contents; empty: none."""
        elements, outputs = self._work.elements, self.outputs()
        looked_at = {name: outputs[name].flatten()[at][None] for name, at in elements.items()}
        return self._judge(KeptLaunches(looked_at, [w], [x]), tolerance)

    def _judge(self, kept: KeptLaunches, tolerance: float) -> str:
        problem, place = self._work.judge_kept(kept, self._draw, tolerance)
        if problem:
            w = kept.weights[place]
            self.failed = kept.activations[place], self.weights.index_of(w)
        return problem


class UnseenInputs:
    """Activations of the next launches, one operand each, drawn from the contents of the bank.

    For new ones the elements of each buffer are rolled: bytes of the same distribution. So are
    streamed inputs that a launch need not have seen. launches: number of launches with operands of
    their own.
    """

    def __init__(self, buffers: RotatingBuffers) -> None:
        self._buffers = buffers
        self.launches = len(buffers._xs.slots)
        self._copies, self._other_copy = range(0), buffers.weights[0]
        if size := sum(self._other_copy.buffers[name].nbytes for name in buffers._work.exchanged):
            fitting = max(1, _MAX_EXCHANGED_BYTES // size)
            self.launches = min(fitting, self.launches, buffers.copies)
            self._copies, self._other_copy = range(self.launches), self._other_copy.clone()
        self._elsewhere = Slots(buffers._xs.bank[0], self.launches)

    def draw(self, draw: Draw) -> None:
        """Write activations, and start again with the first launch.

        Where launches keep the same ones, others are written elsewhere, which takes as long.
        """
        buffers, lots = self._buffers, self._buffers._draw
        slots = self._elsewhere if draw == "same" else buffers._xs.slots
        bank = buffers._xs.bank
        for i in range(len(slots)):
            content = bank[lots.randrange(len(bank))]
            for name, buffer in slots[i].buffers.items():
                values = content.buffers[name].flatten()
                shift = lots.randrange(1, max(2, len(values)))
                stays = draw == "timed" or name in buffers._work.fixed
                buffer.copy_(values.roll(0 if stays else shift).view_as(buffer))
        for i in self._copies:
            content = buffers.weights.current[i].packed
            to = self._other_copy if draw == "same" else buffers.weights[i]
            for name in sorted(buffers._work.exchanged):
                values = content.buffers[name].flatten()
                shift = lots.randrange(1, max(2, len(values)))
                rolled = values.roll(0 if draw == "timed" else shift)
                to.buffers[name].copy_(rolled.view_as(to.buffers[name]))
        buffers._position = 0

    def draw_known(self, launches: int) -> None:
        """Give the last of so many launches other unseen activations, whose result is known."""
        self.restore_streamed()
        slots = self._buffers._xs.slots
        slots[(launches - 1) % len(slots)].copy_from(self._buffers._work.unseen)

    def restore_streamed(self) -> None:
        """Give streamed inputs their contents again."""
        self._buffers.weights.restore(self._copies, self._buffers._work.exchanged)

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


def poison(out: torch.Tensor) -> None:
    """Fill an output with values that no correct launch produces; integers with their lowest."""
    if out.is_floating_point():
        out.fill_(torch.nan)
    else:
        out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).min)


def random_pad(device: torch.device, seed: int) -> torch.Tensor:
    """A block of random size, which shifts the addresses of later allocations."""
    generator = torch.Generator().manual_seed(seed)
    most = _PAD_BYTES[device.type]
    size = int(torch.randint(1, most, (), generator=generator, device="cpu"))
    return torch.empty(size, dtype=torch.uint8, device=device)


def _written(operand: str, buffer: str) -> str:
    """Format the error for an operand that a launch changed, with the name of its argument."""
    of_input, _, part = buffer.rpartition(".")  # of an operation's input, or of x or w
    operand = of_input or operand
    name = operand if part in ("values", "real") else f"{operand}_{part}"
    return f"launches write into {name}: only outputs are theirs to write"
