"""Operations of an A/B worker: one case at a time in each of its slots."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flexq_bench
from flexq_bench.kernels.autotune import TuningMemory
from flexq_bench.kernels.contract import LinearKernel, PackedOperand
from flexq_bench.kernels.external.sources import hash_of_folders
from flexq_bench.kernels.registry import external_labels
from flexq_bench.measure import Meter
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.given_inputs import Part, Parts, Plain, named_tensors, parts_of
from flexq_bench.measure.judged_work import OwnReference, Role, with_elements
from flexq_bench.measure.prepared import Placed, PreparedCase
from flexq_bench.measure.ranked_case import RankedCase, RankedPlacement
from flexq_bench.measure.sampling import (
    FreeClocks,
    batch_size,
    is_low,
    warm_up,
    warm_up_under_boost,
)
from flexq_bench.measure.shared_tensors import layout_of, read_tensors, write_tensors
from flexq_bench.measure.worker_messages import JUDGED_VERSION, VERSION
from flexq_bench.workloads.case import Case

_SIDES = 2  # of a comparison, which are on the device together
_PACKAGE = Path(flexq_bench.__file__).resolve().parent
_KERNELS = hash_of_folders([_PACKAGE / "kernels"])  # a fork server computes it for all processes


@dataclass
class _Slot:
    """A prepared case, and its current placement, if any: its index and buffers.

    shares: weights with the layer's next case. begun: its launches are captured; placed: it is
    warmed up; None: not so far. free: clocks without the power limit, of the first placement.
    samples: of a batch; gap_us: idle time before each. least_mhz: clock below which a batch of the
    current placement doesn't count. given: the latest inputs, of which a new placement gets the
    weights with its first activations. has_weights: the current one has them. is_first: there
    was no placement before.
    """

    prepared: PreparedCase | RankedCase
    shares: bool = False
    free: FreeClocks | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    index: int = 0
    buffers: Any = None
    begun: Placed | RankedPlacement | None = None
    placed: Placed | RankedPlacement | None = None
    samples: int = 1
    gap_us: float = 0.0
    least_mhz: float | None = None
    given: dict[str, Part] = field(default_factory=dict)
    has_weights: bool = False
    is_first: bool = True

    def begin(self) -> Placed | RankedPlacement:
        """Begin to use the buffers of the placement."""
        case = self.prepared
        if isinstance(case, RankedCase):
            return self.resources.enter_context(case.placed(self.index))
        return self.resources.enter_context(case.placed(self.index, buffers=self.buffers))

    def leave(self) -> None:
        """Free the current placement."""
        self.resources.close()
        self.begun = self.placed = self.buffers = None
        self.has_weights = False


class WorkerOperations:
    """The operations of a worker on one device, with the names used in messages.

    Each takes and returns plain values. Raises the exceptions of preparing and measuring a case,
    and LookupError for a slot without a prepared case. memory: of choices; None: of this process.
    """

    def __init__(self, meter: Meter, memory: TuningMemory | None = None) -> None:
        self._meter = meter
        self._tuning = TuningMemory() if memory is None else memory
        self._slots: dict[str, _Slot] = {}
        # Copies of the weights of each slot's latest placement. The next case of the layer has
        # them, too: to free and allocate them takes longer than its turns.
        self._copies: dict[str, Sequence[PackedOperand]] = {}
        self._judged: tuple[str, OwnReference] | None = None  # the latest case
        self._is_warm = False

    def describe(self) -> dict[str, Any]:
        """Return versions of messages, judging and protocol, sources, and the device.

        waits_for_request: the process had not used the device before its first request.
        warms_when_used: a placement is warmed up by its first use, and `prepare` may leave out its
        check. shares_weights: `prepare` may keep the weights of a layer. repeats_contents: it may
        give copies of the weights the same contents. holds_inputs: it can `hold` them.
        takes_findings: `place` takes what `turn` found in an earlier process. takes_secret: it can
        `reseed`, and `launch_again`. root: the source folder.
        kernels: hash of the sources of the kernels; empty: external ones, whose builds it would not
        cover.
        """
        device = self._meter.device_info
        return {
            "version": VERSION,
            "judged": JUDGED_VERSION,
            "waits_for_request": True,
            "warms_when_used": True,
            "shares_weights": True,
            "repeats_contents": True,
            "holds_inputs": True,
            "takes_findings": True,
            "takes_secret": True,
            "protocol": self._meter.protocol.version,
            "root": str(_PACKAGE.parent),
            "kernels": "" if external_labels() else _KERNELS,
            "device": {"uuid": device.uuid, "sku": device.sku},
        }

    def reseed(self, secret: int) -> dict[str, Any]:
        """Draw the inputs that change between samples from this secret, in cases from now on."""
        self._meter.secret = secret
        return {}

    def memory(self, case: str) -> dict[str, Any]:
        """Bytes that the case needs, and free bytes, if need be without the weights kept so far."""
        needed = self._meter.memory_needed(Case.from_key(case))
        if _SIDES * needed > self._meter.free_memory():
            self._copies.clear()
            self._meter.forget_weights()
        return {"needed": needed, "free": self._meter.free_memory()}

    def prepare(
        self,
        slot: str,
        case: str,
        config: Mapping[str, Any] | None = None,
        favourite: Mapping[str, Any] | None = None,
        check: bool = True,
        shares: bool = False,
        distinct: bool = True,
    ) -> dict[str, Any]:
        """Draw inputs, choose a configuration unless one is given, check the result if asked.

        check: False leaves the result to a judge. shares: the weights of a layer are kept for its
        next case. distinct: no two copies of the weights have the same content; heeded on a CPU
        only, which takes longer to draw them than to measure.
        """
        self.release(slot)
        distinct = distinct or self._meter.torch_device.type != "cpu"
        prepared = self._meter.prepare(Case.from_key(case), shares=shares, distinct=distinct)
        if config is None:
            machine = self._meter.tuning_machine
            prepared.choose_config(self._tuning, machine, favourite=favourite)
        else:
            prepared.use_config(config)
        self._slots[slot] = _Slot(prepared, shares)
        checked = prepared.check("before") if check else CheckResult(None, None)
        self._meter.release_memory()  # for the other side, which may be another process
        return {
            "config": {} if prepared.config is None else prepared.config.as_dict(),
            "binary": prepared.binary_hash,
            "wrong": checked.detail,
            "max_rel_error": checked.max_rel_error,
            "formats": prepared.format_names,
            "copies": prepared.copies,
            "secret": self._meter.secret,
        }

    def place(
        self,
        slot: str,
        index: int,
        beside: str | None = None,
        is_warm: bool = False,
        warm_up: bool = True,
        launches: int | None = None,
        device_mhz: float | None = None,
    ) -> dict[str, Any]:
        """Allocate the buffers of placement `index`. Its first use warms it up.

        beside: a slot whose weight copies are shared if they have the same bytes. is_warm: the
        device was just busy, in another process. warm_up: False leaves it to a judge, who then says
        how many samples a turn has. launches: of a sample, as in an earlier process, so that they
        are captured now, which takes no measurement; None: their number is determined by timing.
        device_mhz: the device's clock without load, from there as well.
        """
        mine = self._slots[slot]
        self._is_warm = self._is_warm or is_warm
        mine.leave()
        weights = self._copies.pop(slot, None)
        if beside is not None:
            others = self._slots[beside].buffers
            weights = None if others is None else others.weights
        elif not mine.is_first:
            weights = None  # placements of a case have addresses of their own
        mine.is_first = False
        mine.index, mine.buffers = index, mine.prepared.buffers(index, weights=weights)
        shared = beside is not None and mine.buffers.weights is weights
        if mine.shares:
            self._copies[slot] = mine.buffers.weights
        if device_mhz is not None:
            mine.free = FreeClocks(device_mhz)
        reply = {"copies": mine.prepared.copies, "shared": shared}
        if launches is not None:
            mine.prepared.assume_launches(launches)
            mine.begun = mine.begin()
        if warm_up:
            return reply
        mine.placed = mine.begin()
        return reply | {"launches": mine.placed.rotation.launches}

    def _warm_up(self, mine: _Slot, *, boost: bool) -> Placed | RankedPlacement:
        placed = mine.begun or mine.begin()
        protocol, now = self._meter.protocol, time.perf_counter
        phase = protocol.rewarm if self._is_warm else protocol.warm_up
        if boost:
            mine.free = mine.free or FreeClocks(self._meter.free_mhz())
            warmed, gap, mine.free = warm_up_under_boost(
                placed.rotation, phase, protocol, mine.free, now
            )
            mine.gap_us = protocol.gaps[gap] * warmed.sample_s * 1e6
            # The verdict compares the clocks of both sides, so a lower one still gives data.
            mine.least_mhz = mine.free.lowered_to(warmed.batch).least_mhz(protocol)
        else:
            # Three batches that agree fit into the least time.
            batch_s = min(protocol.batch_s, phase.max_s / 4)
            warmed = warm_up(placed.rotation, phase, batch_s, now)
        mine.samples = batch_size(warmed.sample_s, protocol.turn_s)
        self._is_warm = True
        return placed

    def hold(self, slot: str, path: str, layout: list[list[Any]], plain: Plain) -> dict[str, Any]:
        """Keep inputs from shared memory, which the placement gets with the next `fill`."""
        tensors = read_tensors(Path(path), layout, self._meter.torch_device)
        self._slots[slot].given |= parts_of(tensors, plain)
        return {}

    def fill(
        self, slot: str, path: str, layout: list[list[Any]], plain: Plain, weights: bool
    ) -> dict[str, Any]:
        """Give inputs from shared memory to the last launch of each turn.

        layout: of the tensors there (see shared_tensors). plain: see given_inputs. weights: the
        weights, or what else is streamed, are among them; else the latest are kept.
        """
        # Who gives inputs takes samples without gaps, whatever the clock is then.
        placed, mine = self._placed(slot, boost=False), self._slots[slot]
        if isinstance(placed, RankedPlacement):
            placed.fill(path, layout, plain)
            return {}
        assert isinstance(mine.prepared, PreparedCase)  # as its placement is
        parts = parts_of(read_tensors(Path(path), layout, self._meter.torch_device), plain)
        mine.given |= parts
        inputs = mine.prepared.given(mine.given)
        is_new = weights or not mine.has_weights
        placed.buffers.fill(inputs, placed.config, weights=is_new)
        mine.has_weights = True
        placed.clock.synchronize()  # they are timed on another stream
        return {}

    def output(self, slot: str, path: str) -> dict[str, Any]:
        """Write the results of the latest launch that have elements, in the order of their names.

        A linear layer has one: `out` [M,N].
        """
        placed = self._placed(slot)
        if isinstance(placed, RankedPlacement):
            placed.output(path)
            return {}
        write_tensors(Path(path), with_elements(placed.buffers.outputs()))
        return {}

    def quantize(
        self, slot: str, path: str, layout: list[list[Any]], operand: str, out: str
    ) -> dict[str, Any]:
        """Quantize `real` of shared memory by the kernel's own rule, into shared memory.

        operand: x or w. Returns the layout of the result, and what is no tensor.
        """
        prepared = self._slots[slot].prepared
        assert isinstance(prepared, PreparedCase)  # no linear layer is of several GPUs
        kernel = prepared.kernel
        assert isinstance(kernel, LinearKernel)  # others have no inputs
        real = read_tensors(Path(path), layout, self._meter.torch_device)["real"]
        quantize = kernel.quantize_weight if operand == "w" else kernel.quantize_activation
        return _written({operand: quantize(real)}, out)

    def draw(self, case: str, role: Role, seed: int, out: str) -> dict[str, Any]:
        """Draw inputs of an operation into shared memory, by its definition here.

        A judge who doesn't run this definition gives them to another worker. Returns as `quantize`.
        """
        return _written(self._reference(case).draw(role, seed), out)

    def judge(
        self, case: str, streamed: int, fresh: int, path: str, layout: list[list[Any]]
    ) -> dict[str, Any]:
        """Compare outputs of another worker, in shared memory, with those that are expected here.

        streamed, fresh: the seeds of its inputs.
        """
        outputs = read_tensors(Path(path), layout, self._meter.torch_device)
        found = self._reference(case).judge(streamed, fresh, outputs)
        return {"max_rel_error": found.max_rel_error, "exact": found.exact, "wrong": found.detail}

    def _reference(self, case: str) -> OwnReference:
        if self._judged is None or self._judged[0] != case:
            found, meter = Case.from_key(case), self._meter
            spec, tolerance = meter.spec_of(found), meter.protocol.tolerance
            reference = OwnReference(found, spec, meter.torch_device, tolerance)
            self._judged = case, reference
        return self._judged[1]

    def turn(
        self,
        slot: str,
        gap_us: float | None = None,
        kept: int | None = None,
        count: int | None = None,
        steady: bool = False,
    ) -> dict[str, Any]:
        """A batch of samples on the placement, and the SM clock during it.

        gap_us: idle time before each; None: the gap that kept the clock up when it was placed.
        kept: number of untimed samples whose outputs are kept; None: it is drawn. count: of timed
        samples; None: those of a turn. steady: without gaps, under steady load.
        """
        placed, mine = self._placed(slot), self._slots[slot]
        if kept is not None:
            if isinstance(placed, RankedPlacement):
                placed.rotation.keep_samples(kept)
            else:
                placed.buffers.between.keep_samples(kept)
        gap_us = mine.gap_us if gap_us is None else gap_us
        samples = mine.samples if count is None else count
        batch = placed.rotation.sample(samples, gap_us=None if steady else gap_us)
        clocks = [mhz for mhz in batch.sm_mhz if mhz is not None]
        mhz = statistics.median(clocks) if clocks else None
        return {
            "samples_us": batch.times_us,
            "launches": placed.rotation.launches,
            "device_mhz": None if mine.free is None else mine.free.device_mhz,
            "sm_mhz": batch.sm_mhz,
            "mhz": mhz,
            "trim": self._meter.protocol.trim,
            "valid": not gap_us or not is_low(mhz, mine.least_mhz),
        }

    def inspect(self, slot: str) -> dict[str, Any]:
        """Check the results of the timed launches."""
        return {"wrong": self._placed(slot).inspect()}

    def leave(self, slot: str, inspect: bool = True) -> dict[str, Any]:
        """Free the placement. inspect: check the results of the timed launches before."""
        placed = self._placed(slot)
        wrong = placed.inspect() if inspect else ""
        reply = {"wrong": wrong, "failed": placed.failed}
        self._slots[slot].leave()
        return reply

    def launch_again(self, slot: str, x: int, w: int) -> dict[str, Any]:
        """Launch on the inputs of a wrong launch, which `leave` named with the same secret."""
        placed = self._placed(slot)
        assert isinstance(placed, Placed)  # others name none
        return {"wrong": placed.launch_again(x, w)}

    def release(self, slot: str) -> dict[str, Any]:
        """Release the case and its memory; no effect if there is none."""
        old = self._slots.pop(slot, None)
        if old is not None:
            old.leave()
            old.prepared.close()
            del old
            self._meter.release_memory()
        return {}

    def _placed(self, slot: str, *, boost: bool = True) -> Placed | RankedPlacement:
        """The current placement, warmed up. boost: by the rules of this regime."""
        mine = self._slots[slot]
        if mine.buffers is None:
            raise LookupError(f"slot {slot!r} has no placement")
        if mine.placed is None:
            mine.placed = self._warm_up(mine, boost=boost)
        return mine.placed


def _written(parts: Parts, out: str) -> dict[str, Any]:
    """Write parts into shared memory; return what a reader needs."""
    tensors, plain = named_tensors(parts)
    write_tensors(Path(out), tensors)
    return {"layout": layout_of(tensors), "plain": plain}
