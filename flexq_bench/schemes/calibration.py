"""Calibration data, the inputs that it gives each block, and statistics of each site's input."""

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
_HASHED_TOKENS = 64  # at the start of a segment: texts share shorter passages by chance
_HASH_DIGITS = 16
_MOST_AT_ONCE = 8  # segments
_FILLS_A_GPU = 2**30  # parameters times segments: below, a GPU waits for launches


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
        """SHA-256, hexadecimal, of the ids as little-endian int64, segment by segment."""
        return hashlib.sha256(_id_bytes(self.tokens)).hexdigest()

    @property
    def segment_hashes(self) -> tuple[str, ...]:
        """Of each segment the hash of its first tokens, for `contained_segments`."""
        width = min(_HASHED_TOKENS, self.length)
        return tuple(_hash(_id_bytes(segment[:width])) for segment in self.tokens)


def contained_segments(hashes: Sequence[str], length: int, tokens: torch.Tensor) -> int:
    """Number of segments whose first tokens stand anywhere in a text, tokens [T].

    hashes: segment_hashes of a Calibration with segments of `length` tokens.
    """
    data, width = _id_bytes(tokens), 8 * min(_HASHED_TOKENS, length)
    starts = range(0, len(data) - width + 1, 8) if hashes else ()
    present = {_hash(data[start : start + width]) for start in starts}
    return sum(one in present for one in hashes)


def _id_bytes(tokens: torch.Tensor) -> bytes:
    return tokens.cpu().numpy().astype("<i8").tobytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]


def calibration_segments(
    tokens: torch.Tensor, *, segments: int, length: int, seed: int = 0
) -> Calibration:
    """Segments at random places of a text, tokens [T]: seeded, in a random order.

    They start at multiples of `length`, so that none is drawn twice.
    Raises QuantizeError if the text has fewer tokens than that takes.
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


def segments_at_once(model: nn.Module) -> int:
    """Number of segments to run through a model together: one on a CPU or of a large model.

    A GPU runs a small model's layers faster than a host launches them, so several go together.
    """
    if next(model.parameters()).device.type == "cpu":
        return 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return max(1, min(_MOST_AT_ONCE, _FILLS_A_GPU // parameters))


class BlockStream:
    """The inputs of one block after another, for all calibration segments.

    Only the hidden states of one block are kept: segments · length · hidden values, on the model's
    device. `advance` runs a block, as it is then, to get the inputs of the next one: quantize a
    block first and the next one sees what the quantized model would give it.

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
        """Hidden states [1, length, hidden] at the current block, one a segment."""
        return self._inputs

    @torch.no_grad()
    def advance(self) -> None:
        """Go on to the next block."""
        module = self._layout.block_module(self._model, self.block)
        for start in range(0, len(self._inputs), self._at_once):
            together = torch.cat(self._inputs[start : start + self._at_once])
            self._inputs[start : start + self._at_once] = torch.split(self.run(module, together), 1)
        self.block += 1

    def run(self, module: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        """The block's output for hidden states [segments, length, hidden]; keeps gradients.

        module: the block, or what stands in for it and takes the same arguments.
        """
        output = module(hidden, **self._arguments[self.block])
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states

    @torch.no_grad()
    def observe(self, observer: Observer) -> None:
        """Run the current block on all segments and show each site's input rows [tokens, K]."""
        module = self._layout.block_module(self._model, self.block)
        with observing(self._model, self._layout.of_block(self.block), observer):
            dtype = next(module.parameters()).dtype  # FP32 while a scheme works on the block
            for start in range(0, len(self._inputs), self._at_once):
                self.run(module, torch.cat(self._inputs[start : start + self._at_once]).to(dtype))


@contextmanager
def observing(model: nn.Module, sites: Sequence[LinearSite], observer: Observer) -> Iterator[None]:
    """While it lasts, each forward pass shows the sites' input rows [tokens, K] to `observer`."""

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
    """Observer that sums up, for each site, the statistics of its inputs that schemes use.

    absmax: [K], largest |x| of each channel. abs_sum, square_sum: float64 [K]. hessian: float64
    [K, K], the sum of x xᵀ over tokens, where asked for. count: tokens seen.
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


class _Captured(Exception):  # noqa: N818 - it ends a forward pass on purpose, nothing is wrong
    """The first block's inputs are known."""


@torch.no_grad()
def _capture(
    model: nn.Module, layout: ModelMap, calibration: Calibration
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The first block's inputs, one a segment, and what each block is given beside them.

    Positions and masks are equal for all segments, but not for all blocks: some models attend to
    the whole text in every other block only, or have other rotary embeddings there.
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
        for segment in calibration.tokens:  # the first one goes through all blocks
            try:
                model(input_ids=segment[None].to(device), use_cache=False)
            except _Captured:
                continue
    finally:
        for handle in handles:
            handle.remove()
    return inputs, arguments
