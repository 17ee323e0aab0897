"""Calibration data, the inputs of each block computed from it, and statistics of site inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import LinearSite, ModelMap

Observer = Callable[[LinearSite, torch.Tensor], None]
_HASHED_TOKENS = 64  # hashed at the start of a segment; different texts may share shorter passages
_HASH_DIGITS = 16
_LONG = 1024  # tokens of a segment
_MOST_AT_ONCE = 8  # long segments
_FILLS_A_GPU = 2**30  # parameters times long segments; with less, launch overhead dominates


@dataclass(frozen=True, slots=True)
class Calibration:
    """Segments of text, int64 [segments, length], on the CPU."""

    tokens: torch.Tensor

    @property
    def segments(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the ids as little-endian int64, segment by segment."""
        return hashlib.sha256(_id_bytes(self.tokens)).hexdigest()

    @property
    def segment_hashes(self) -> tuple[str, ...]:
        """Return a hash of the first tokens of each segment, for `contained_segments`."""
        width = min(_HASHED_TOKENS, self.length)
        return tuple(_hash(_id_bytes(segment[:width])) for segment in self.tokens)


def contained_segments(hashes: Sequence[str], length: int, tokens: torch.Tensor) -> int:
    """Count the segments whose first tokens occur anywhere in a text, tokens [T].

    hashes: segment_hashes of a Calibration with segments of `length` tokens.
    """
    data, width = _id_bytes(tokens), 8 * min(_HASHED_TOKENS, length)
    starts = range(0, len(data) - width + 1, 8) if hashes else ()
    present = {_hash(data[start : start + width]) for start in starts}
    return sum(digest in present for digest in hashes)


def _id_bytes(tokens: torch.Tensor) -> bytes:
    return tokens.cpu().numpy().astype("<i8").tobytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]


def calibration_segments(
    tokens: torch.Tensor, *, segments: int, length: int, seed: int = 0
) -> Calibration:
    """Draw segments at random places of a text, tokens [T], in a random but seeded order.

    They start at multiples of `length`, so that none is drawn twice. Raises QuantizeError if the
    text has too few tokens.
    """
    if segments < 1 or length < 2:
        raise QuantizeError(
            f"calibration needs at least 1 segment of 2 tokens, got {segments} of {length}"
        )
    available = tokens.numel() // length
    if available < segments:
        fewer = f"ask for {available} at most" if available else "for shorter segments"
        raise QuantizeError(
            f"calibration needs {segments} segments of {length} tokens, the text has "
            f"{tokens.numel():,} tokens: give a longer text, or {fewer}"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(available, generator=generator)[:segments]
    return Calibration(tokens[: available * length].view(available, length)[chosen].clone().cpu())


def segments_at_once(model: nn.Module, length: int = _LONG) -> int:
    """Return the number of segments to run through a model together; 1 on a CPU.

    On a GPU, launching the layers of a small model, or for few tokens, takes longer than running
    them, so several segments are batched. length: tokens of a segment.
    """
    if next(model.parameters()).device.type == "cpu":
        return 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return max(1, min(_MOST_AT_ONCE, _FILLS_A_GPU // parameters)) * max(1, _LONG // length)


class BlockStream:
    """The inputs of one block after another, for all calibration segments.

    Only the hidden states of one block are stored: segments · length · hidden values, on the
    model's device. `advance` runs the block in its current state to compute the inputs of the next
    one: if the block is quantized first, the next block gets the inputs of the quantized model.

    at_once: segments that `advance` and `observe` run together; None: see segments_at_once.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelMap,
        calibration: Calibration,
        *,
        at_once: int | None = None,
    ) -> None:
        self._model, self._layout = model, layout
        self._at_once = at_once or segments_at_once(model)
        self.block = 0
        self._inputs, self._arguments = _capture(model, layout, calibration)

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """Hidden states [1, length, hidden] at the current block, one tensor per segment."""
        return self._inputs

    @torch.no_grad()
    def advance(self) -> None:
        """Run the current block and move to the next one."""
        module = self._layout.block_module(self._model, self.block)
        for start in range(0, len(self._inputs), self._at_once):
            together = torch.cat(self._inputs[start : start + self._at_once])
            self._inputs[start : start + self._at_once] = torch.split(self.run(module, together), 1)
        self.block += 1

    def run(self, module: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """Compute the block's output for hidden states [segments, length, hidden], with gradients.

        module: the block, or a replacement with the same arguments.
        """
        arguments = dict(self._arguments[self.block])
        if isinstance(alibi := arguments.get("alibi"), torch.Tensor):
            # BLOOM and Falcon add it by baddbmm, which neither broadcasts nor converts:
            # [segments x heads, 1, length], captured with one segment.
            arguments["alibi"] = alibi.to(hidden.dtype).repeat(len(hidden), 1, 1)
        output = module(hidden, **arguments)
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states

    @torch.no_grad()
    def observe(self, observer: Observer) -> None:
        """Run the current block on all segments, and pass each site's input rows [tokens, K]."""
        module = self._layout.block_module(self._model, self.block)
        with observing(self._model, self._layout.of_block(self.block), observer):
            dtype = next(module.parameters()).dtype  # FP32 while a scheme quantizes the block
            for start in range(0, len(self._inputs), self._at_once):
                self.run(module, torch.cat(self._inputs[start : start + self._at_once]).to(dtype))


@contextmanager
def observing(model: nn.Module, sites: Sequence[LinearSite], observer: Observer) -> Iterator[None]:
    """Pass the sites' input rows [tokens, K] of each forward pass in the block to `observer`."""

    def hook(site: LinearSite) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            rows = arguments[0].detach()
            observer(site, rows.reshape(-1, rows.shape[-1]))

        return see

    handles = [
        model.get_submodule(site.name).register_forward_pre_hook(hook(site)) for site in sites
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Statistics:
    """Observer that accumulates the statistics of each site's inputs that schemes use.

    absmax: [K], largest |x| of each channel. abs_sum, square_sum: float64 [K]. hessian: float64 [K,
    K], the sum of x xᵀ over tokens, if requested. count: number of tokens.
    """

    def __init__(self, *, hessian: bool = False) -> None:
        self._with_hessian = hessian
        self.absmax: dict[str, torch.Tensor] = {}
        self.abs_sum: dict[str, torch.Tensor] = {}
        self.square_sum: dict[str, torch.Tensor] = {}
        self.hessian: dict[str, torch.Tensor] = {}
        self.count: dict[str, int] = {}

    def __call__(self, site: LinearSite, rows: torch.Tensor) -> None:
        """Add input rows [tokens, K] of a site."""
        name = site.name
        largest, squares = rows.abs().amax(dim=0), rows.double().square().sum(dim=0)
        magnitudes = rows.double().abs().sum(dim=0)
        if name in self.count:
            self.absmax[name] = torch.maximum(self.absmax[name], largest)
            self.abs_sum[name] += magnitudes
            self.square_sum[name] += squares
        else:
            self.absmax[name], self.abs_sum[name] = largest, magnitudes
            self.square_sum[name], self.count[name] = squares, 0
        self.count[name] += rows.shape[0]
        if self._with_hessian:
            work = rows.double()
            outer = work.T @ work
            self.hessian[name] = outer + self.hessian.get(name, 0)


class InputSamples:
    """Observer that stores the same number of rows of every segment, `rows` in total at most.

    Rows are spread evenly over a segment and include its first token, which has the largest values.
    """

    def __init__(self, rows: int, per_segment: int = 64) -> None:
        self._rows, self._per_segment = rows, per_segment
        self._parts: dict[str, list[torch.Tensor]] = {}

    def __call__(self, site: LinearSite, rows: torch.Tensor) -> None:
        """Store some of the input rows [tokens, K] of a site."""
        parts = self._parts.setdefault(site.name, [])
        room = self._rows - sum(part.shape[0] for part in parts)
        step = max(1, -(-rows.shape[0] // self._per_segment))
        if room > 0:
            parts.append(rows[::step][:room].clone())

    def of(self, site: LinearSite) -> torch.Tensor:
        """Return rows [<= rows, K] of a site's input; no rows for an expert without tokens."""
        parts = self._parts.get(site.name)
        return torch.empty(0, site.k) if parts is None else torch.cat(parts)


class _Captured(Exception):  # noqa: N818 - it ends a forward pass on purpose, nothing is wrong
    """Raised to end a forward pass once the first block's inputs are captured."""


@torch.no_grad()
def _capture(
    model: nn.Module, layout: ModelMap, calibration: Calibration
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Capture the first block's inputs for each segment, and the other arguments of each block.

    Positions and masks are equal for all segments, but not for all blocks: some models have full
    attention, or other rotary embeddings, in only some of their blocks.
    """
    inputs: list[torch.Tensor] = []
    arguments: list[dict[str, Any]] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keywords = dict(kwargs)
        hidden = args[0] if args else keywords.pop("hidden_states")
        if len(arguments) < layout.blocks:
            arguments.append(keywords)
        if module is first:
            inputs.append(hidden)
            if len(arguments) == layout.blocks:
                raise _Captured

    first = layout.block_module(model, 0)
    device = next(model.parameters()).device
    handles = [
        layout.block_module(model, block).register_forward_pre_hook(see, with_kwargs=True)
        for block in range(layout.blocks)
    ]
    try:
        for segment in calibration.tokens:  # only the first one runs through all blocks
            try:
                model(input_ids=segment[None].to(device), use_cache=False)
            except _Captured:
                continue
    finally:
        for handle in handles:
            handle.remove()
    return inputs, arguments
