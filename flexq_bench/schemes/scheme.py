"""Base class of the schemes: name, source and options, and the loop over a model's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from flexq_bench.kernels.formats import FP16, NumberFormat
from flexq_bench.schemes.calibration import BlockStream, Calibration
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import ModelMap, map_model
from flexq_bench.schemes.rotation import Rotation
from flexq_bench.schemes.smoothing import Folds

Progress = Callable[[int, int, str], None]
"""Called with the completed blocks, all blocks, and a description of the current step."""


@dataclass(frozen=True, slots=True)
class SchemeOptions:
    """Base of a scheme's options: a frozen dataclass with the paper's defaults.

    Fields are int, float, bool, str, None or a tuple of str, so that they can be part of a name in
    brackets, and of a JSON header.

    kv_bits: of cached keys and values (kernels.decoder.kv); also set by `name+kv8`.
    """

    kv_bits: int = field(default=16, kw_only=True)

    @property
    def weight(self) -> NumberFormat:
        """Format of the weights of all layers."""
        return FP16

    @property
    def activation(self) -> NumberFormat | None:
        """Format of the inputs of all layers; None: see LayerFormats."""
        return FP16


@dataclass(frozen=True, slots=True)
class QuantizationState:
    """State of the model that is being quantized, as needed by a scheme.

    stream: at the current block; None: the scheme needs no calibration.
    original: the same for the original model; None: the scheme doesn't compare with it. The scheme
    advances it before it changes the block.
    generator: on the CPU, seeded; source of all random numbers.
    decided: names of sites chosen by `prepare`, by purpose.
    folds: the scales folded into the model so far.
    rotations: of the residual stream, decided by `prepare`: none or one.
    """

    model: nn.Module
    layout: ModelMap
    calibration: Calibration | None
    stream: BlockStream | None
    original: BlockStream | None
    generator: torch.Generator
    seed: int
    progress: Progress | None
    decided: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folds: Folds = field(default_factory=Folds)
    rotations: list[Rotation] = field(default_factory=list)

    @property
    def inputs(self) -> BlockStream:
        """The stream, for schemes that need calibration."""
        if self.stream is None:
            raise QuantizeError("this scheme needs calibration data: give --calibration FILE")
        return self.stream


class Scheme(ABC):
    """A method to quantize models. It stores no state of a model: one object serves many.

    version: to be increased when the same name and options give other numbers. source: paper and
    section.
    """

    version: ClassVar[int] = 1
    source: ClassVar[str]

    def __init__(self, name: str, options: SchemeOptions) -> None:
        self.name = name
        self.options = options

    @property
    def kv_bits(self) -> int:
        """Bits of the KV cache of the quantized model: 16, 8 or 4.

        Keys and values are rounded when the cache stores them, after the rotary embedding.
        """
        return self.options.kv_bits

    @property
    def needs_calibration(self) -> bool:
        """True if `quantize` requires calibration data."""
        return False

    @property
    def needs_stream(self) -> bool:
        """True if `quantize_block` needs the inputs of its block."""
        return self.needs_calibration

    @property
    def changes_ends(self) -> bool:
        """True if `prepare` changes the embedding, the last norm and the output head."""
        return False

    @property
    def needs_original(self) -> bool:
        """True if `quantize_block` compares with the original model's outputs."""
        return False

    def quantize(
        self,
        model: nn.Module,
        calibration: Calibration | None = None,
        *,
        seed: int = 0,
        progress: Progress | None = None,
        before_block: Callable[[int], None] | None = None,
        on_block: Callable[[int], None] | None = None,
        layout: ModelMap | None = None,
    ) -> Folds:
        """Quantize a dense model in place: its sites become FakeQuantizedLinear.

        Returns the scales that were folded into it.

        before_block, on_block: called with a block's index, for models of which only one block is
        in memory. The weights of a block must be in memory, and are changed, between the two calls.
        Before the first call they are only read by forward passes of the block, which may load
        them. After on_block the block is not used any more, so it may be written and freed.

        layout: the model's map; None: it is made. Making it runs the model on the meta device, so a
        model whose forward pass loads blocks needs one.

        The same model, data, options and seed give the same numbers. Raises QuantizeError if the
        model has no map or is already quantized, or if required calibration data are missing.
        """
        layout = layout or map_model(model)
        if self.needs_calibration and calibration is None:
            raise QuantizeError(f"{self.name} needs calibration data: give --calibration FILE")
        if not self.needs_calibration:
            calibration = None
        was_training = model.training
        model.eval()
        with self.adapted(model):
            state = self._initial_state(model, layout, calibration, seed, progress)
            self._quantize_blocks(state, before_block, on_block)
        model.train(was_training)
        return state.folds

    def adapted(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model is quantized; by default it is left as it is."""
        return nullcontext()

    def _initial_state(
        self,
        model: nn.Module,
        layout: ModelMap,
        calibration: Calibration | None,
        seed: int,
        progress: Progress | None,
    ) -> QuantizationState:
        stream = original = None
        if calibration is not None and self.needs_stream:
            stream = BlockStream(model, layout, calibration)
        if calibration is not None and self.needs_original:
            original = BlockStream(model, layout, calibration)
        generator = torch.Generator().manual_seed(seed)
        return QuantizationState(
            model, layout, calibration, stream, original, generator, seed, progress
        )

    def _quantize_blocks(
        self,
        state: QuantizationState,
        before_block: Callable[[int], None] | None,
        on_block: Callable[[int], None] | None,
    ) -> None:
        progress, blocks = state.progress, state.layout.blocks
        self.prepare(state)
        for block in range(blocks):
            if progress is not None:
                progress(block, blocks, f"{self.name}: block {block}")
            if before_block is not None:
                before_block(block)
            try:
                self.quantize_block(state, block)
            except ValueError as error:  # values that can't be rounded or smoothed
                raise QuantizeError(f"{self.name}: block {block}: {error}") from error
            if state.stream is not None and block + 1 < blocks:
                state.stream.advance()
            if on_block is not None:
                on_block(block)
        if progress is not None:
            progress(blocks, blocks, self.name)

    def prepare(self, state: QuantizationState) -> None:
        """Make decisions about the whole model before its first block is quantized."""
        return

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        """Return the formats of the sites of a kind (`q_proj`, `fc1`); by default of the options.

        gated: the model's feed-forward is gated. If calibration or options choose single sites,
        these are the formats of the other sites.
        """
        return LayerFormats(self.options.weight, self.options.activation)

    @abstractmethod
    def quantize_block(self, state: QuantizationState, block: int) -> None:
        """Replace every site of this block; state.stream, if any, must be at this block."""
