"""Base class of the readers of layers that other tools quantized."""

from __future__ import annotations

import fnmatch
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.integers import exact_scales
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, StaticActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_BIAS = "bias"
# Keys of config.json with the modules that a tool did not quantize.
_EXCLUSIONS = (
    *("ignore", "ignored_layers", "exclude", "exclude_modules", "modules_to_not_convert"),
    *("llm_int8_skip_modules", "skip_modules"),
)
_SMALLEST_SCALE = 1e-5  # that a tool writes for a matrix of zeros
_PATTERN = re.compile(r"[\\\[(|^$+?*]")
ONE: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
"""Shapes of a tensor with one value."""


class LayerReader(ABC):
    """The quantized layers of a folder, in the layout of one tool.

    method: `quant_method` of its config.json.
    parts:  names of the tensors that only quantized layers have.
    section: the quantization settings of config.json.
    names:  every module with quantized weights, including the output head and embeddings.
    expected: shapes [N, K] in the model, by name; empty if transformers doesn't know it.
    names_all: the settings name every layer that is not quantized.
    """

    method: str
    parts: tuple[str, ...]
    names_all = True

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._tensors = tensors
        self._section = section
        self.expected: Mapping[str, tuple[int, ...]] = {}
        self.names = tuple(sorted({module for module, _ in self._parts()}))

    def check_excluded(self) -> None:
        """Raise CheckpointError if a layer has codes that the configuration excludes."""
        for name in self.names:
            if key := self.excluded_by(name):
                raise CheckpointError(
                    f"{self._tensors.folder.name}: {name} has codes, and its config.json says that "
                    f"it is not quantized ({key}): copy the folder again"
                )

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        """Return the key of config.json by which a module is not quantized; empty: it is.

        loosely: an entry may be any part of a name, as some tools understand it.
        """
        for key in _EXCLUSIONS:
            entries = self._section.get(key) or ()
            for entry in [entries] if isinstance(entries, str) else entries:
                if excludes(name, str(entry)) or (loosely and str(entry) in name):
                    return key
        return ""

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        """The layer of this name, with codes and scales as stored.

        Scales are FP16 if that is exact, otherwise of their own type. Raises CheckpointError if
        tensors are missing, damaged, or contradict each other or the configuration.
        """
        operand = self._operand(name, device)
        values = (
            operand.values.view(torch.uint8) if operand.values.itemsize == 1 else operand.values
        )
        if bool((values == values[0, 0]).all()) and not _is_zero(operand):
            raise CheckpointError(
                f"{self._tensors.folder.name}: all codes of {name} are equal: copy the folder again"
            )
        return QuantizedLayer(
            operand, self._activation(name), self._bias(name, operand.rows, device)
        )

    @abstractmethod
    def _operand(self, name: str, device: torch.device | str) -> Operand:
        """Codes and scales of a layer. Raises CheckpointError as `layer`."""

    def has_fp8_cache(self) -> bool:
        """Return True if the configuration rounds cached keys and values to E4M3."""
        return False

    def _activation(self, name: str) -> ActivationQuantizer | None:
        """Quantizer of a layer's input; None: not quantized."""
        return None

    @abstractmethod
    def shape(self, name: str) -> tuple[int, int]:
        """N and K of a layer, from its tensors' shapes. Raises CheckpointError as `layer`."""

    @abstractmethod
    def formats(self, name: str) -> str:
        """The formats of a layer in the configuration: `uint4/128`, `int8/row-int8/row`."""

    def nearest_format(self, name: str) -> NumberFormat | None:
        """The format nearest to codes that are read as numbers; None: they are read as codes."""
        return None

    def _is_part(self, module: str, parameter: str) -> bool:
        """Return True for a tensor that only quantized layers have."""
        return parameter in self.parts

    def owned(self) -> frozenset[str]:
        """Tensors that belong to the quantized layers."""
        return frozenset(
            [f"{module}.{parameter}" for module, parameter in self._parts()]
            + [f"{name}.{_BIAS}" for name in self.names if f"{name}.{_BIAS}" in self._tensors]
        )

    def _parts(self) -> Iterator[tuple[str, str]]:
        for name in self._tensors.infos:
            module, _, parameter = name.rpartition(".")
            if self._is_part(module, parameter):
                yield module, parameter

    def _scales(
        self, name: str, *shapes: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Scales of these shapes, see `exact_scales`."""
        return exact_scales(self._tensors.take(name, REALS, *shapes, device=device), name)

    def _static(
        self, number: NumberFormat, scale: str, zero: str | None = None
    ) -> StaticActivation:
        """A static activation of tensors with one scale, and one zero point from -2^(bits-1)."""
        value = float(self._scales(scale, *ONE).item())
        if not value > 0:
            raise CheckpointError(f"{scale} is {value}: copy the folder again")
        point = None
        if zero is not None:
            stored = self._tensors.take(zero, (torch.int8,), *ONE)
            point = int(stored.item()) + (1 << (number.bits - 1))
        return StaticActivation(number, value, point)

    def _matrix(self, name: str) -> tuple[int, int]:
        """Shape of a tensor of two dimensions. Raises CheckpointError if it is missing or no
        matrix.
        """
        shape = self._tensors.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{name} is {list(shape)}, expected a matrix: copy it again")
        return shape[0], shape[1]

    def has_bias(self, name: str) -> bool:
        """Return True if a layer has a bias."""
        return f"{name}.{_BIAS}" in self._tensors

    def _biases(self, name: str) -> torch.Tensor:
        """The stored bias of a layer that has one."""
        return self._tensors.take(f"{name}.{_BIAS}", REALS)

    def _bias(self, name: str, rows: int, device: torch.device | str) -> torch.Tensor | None:
        if not self.has_bias(name):
            return None
        halved = self._biases(name).to(device).to(torch.float16)
        if halved.shape != (rows,) or not bool(torch.isfinite(halved).all()):
            raise CheckpointError(
                f"the bias of {name} is {list(halved.shape)}, expected [{rows}], or holds NaN, "
                "infinity or more than FP16 can carry"
            )
        return halved


def format_names(weight: NumberFormat, activation: ActivationQuantizer | None) -> str:
    """The formats of a layer: `int8/row-int8/row`, or that of its weight alone."""
    return weight.name if activation is None else f"{weight.name}-{activation.format.name}"


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern of a configuration matches from the start of a name.

    Raises CheckpointError if it is not a regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"config.json has the pattern {pattern!r}: {error}") from error


def excludes(name: str, pattern: str) -> bool:
    """Return True if an entry of a list of modules names this one or a module that contains it.

    Entries are names, parts of names between dots, wildcards (`*`), or patterns, with `re:` before
    them (from the start of a name) or without (up to the end of a part).
    """
    if pattern.startswith("re:"):
        return matches(name, pattern.removeprefix("re:"))
    if f".{pattern}." in f".{name}." or not _PATTERN.search(pattern):
        return f".{pattern}." in f".{name}."
    if any(fnmatch.fnmatchcase(name, wild) for wild in (pattern, f"{pattern}.*")):
        return True
    try:
        return re.match(rf"(?:{pattern})(?:\.|$)", name) is not None
    except re.error:  # a wildcard such as *proj
        return False


def _is_zero(operand: Operand) -> bool:
    """Return True for a matrix that was zero before it was quantized, as in blocks that were added.

    Lost codes leave the scales of the numbers that they stood for. Scales of zeros are equal: tiny,
    1 or the precision of a type, both powers of two, or GPTQ's for a range from -1 to 1.
    """
    if operand.scales is None or bool(operand.dequantize(torch.float32).any()):
        return False
    first = operand.scales[0, 0]
    written = (
        float(first) <= _SMALLEST_SCALE
        or math.frexp(float(first))[0] == 0.5
        or math.isclose(float(first), 2 / (2**operand.bits - 1), rel_tol=2**-8)
    )
    return written and bool((operand.scales == first).all())
