"""Base class of the readers of layers that other tools quantized."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.integers import half_change, half_scales
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_BIAS = "bias"


class LayerReader(ABC):
    """The quantized layers of a folder, in the layout of one tool.

    method: `quant_method` of its config.json.
    parts:  names of the tensors that only quantized layers have.
    names:  every module with quantized weights, including the output head and embeddings.
    """

    method: str
    parts: tuple[str, ...]

    def __init__(self, tensors: FolderTensors) -> None:
        self._tensors = tensors
        self.names = tuple(sorted({module for module, _ in self._parts()}))

    @abstractmethod
    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        """The layer of this name, with codes and scales as stored; scales as FP16.

        Raises CheckpointError if tensors are missing, or contradict each other or the
        configuration.
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, int]:
        """N and K of a layer, from its tensors' shapes. Raises CheckpointError as `layer`."""

    @abstractmethod
    def formats(self, name: str) -> str:
        """The formats of a layer in the configuration: `uint4/128`, `int8/row-int8/row`."""

    def _is_part(self, module: str, parameter: str) -> bool:
        """Return True for a tensor that only quantized layers have."""
        return parameter in self.parts

    def _scales(self, name: str) -> Iterator[str]:
        """Names of a layer's tensors with scales."""
        yield f"{name}.scales"

    def owned(self) -> frozenset[str]:
        """Tensors that belong to the quantized layers."""
        return frozenset(
            [f"{module}.{parameter}" for module, parameter in self._parts()]
            + [f"{name}.{_BIAS}" for name in self.names if f"{name}.{_BIAS}" in self._tensors]
        )

    def scale_change(self) -> float:
        """Largest relative change of a scale by rounding to FP16; 0: all are exact.

        Raises CheckpointError if a scale is NaN, infinite or beyond FP16's range.
        """
        worst = 0.0
        for layer in self.names:
            for name in self._scales(layer):
                scales = self._tensors.take(name, REALS)
                half_scales(scales, name)
                if scales.dtype != torch.float16:
                    worst = max(worst, half_change(scales))
        return worst

    def _parts(self) -> Iterator[tuple[str, str]]:
        for name in self._tensors.infos:
            module, _, parameter = name.rpartition(".")
            if self._is_part(module, parameter):
                yield module, parameter

    def _matrix(self, name: str) -> tuple[int, int]:
        """Shape of a tensor of two dimensions. Raises CheckpointError if it is missing or no
        matrix.
        """
        shape = self._tensors.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{name} is {list(shape)}, expected a matrix: copy it again")
        return shape[0], shape[1]

    def _bias(self, name: str, rows: int, device: torch.device | str) -> torch.Tensor | None:
        if f"{name}.{_BIAS}" not in self._tensors:
            return None
        bias = self._tensors.take(f"{name}.{_BIAS}", REALS, (rows,), device=device)
        halved = bias.to(torch.float16)
        if not bool(torch.isfinite(halved).all()):
            raise CheckpointError(f"{name}.{_BIAS} holds NaN, infinity or more than FP16 can carry")
        return halved


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern of a configuration matches from the start of a name.

    Raises CheckpointError if it is not a regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"config.json has the pattern {pattern!r}: {error}") from error
