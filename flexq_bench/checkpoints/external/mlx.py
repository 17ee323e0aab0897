"""MLX's folders: `quantization` of config.json, with group_size, bits and mode (mlx.core.quantize).

transformers' `quant_method` metal is the mode affine.

    weight  uint32 [N, K · bits / 32]  codes without gaps, the lowest bits first
    scales  [N, K / group]             uint8 of modes `mxfp4`, `mxfp8` (exponents plus 127), `nvfp4`
    biases  [N, K / group]             of mode `affine`; metal: qbiases

affine: W = scale · code + bias. A bias is no multiple of its scale, so that no zero point stands
for it: such weights are read as the FP32 numbers that they stand for, and no kernel runs them.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import (
    dequantized,
    float_operand,
    power_scales,
    small_scales,
)
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.checkpoints.packing import unpack_codes
from flexq_bench.kernels.formats import NumberFormat, Operand

METAL = "metal"
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_BITS = (2, 3, 4, 5, 6, 8)
_WORD_BITS = 32


class MlxLayers(LayerReader):
    """Layers of MLX's folders. section: `quantization` of config.json, with single layers' own.

    Raises CheckpointError for unknown modes, bits and groups.
    """

    method = "mlx"
    parts = ("scales", "biases", "qbiases")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        if section.get("quant_method") == METAL:
            self.method = METAL
        super().__init__(tensors, section)
        for name in self.names:
            mode, bits, group = self._settings(name)
            if mode not in _MODES or bits not in _BITS or not isinstance(group, int) or group < 1:
                raise CheckpointError(
                    f"{tensors.folder.name}: {name} is MLX's {mode} of {bits} bits in groups of "
                    f"{group}; read here are {', '.join(_MODES)}: convert it with mlx_lm.convert "
                    "--dequantize"
                )

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        if self._section.get(name) is False:
            return f"{name}: false"
        return super().excluded_by(name, loosely=loosely)

    def _settings(self, name: str) -> tuple[Any, Any, Any]:
        own = self._section.get(name)
        settings = {**self._section, **(own if isinstance(own, dict) else {})}
        return settings.get("mode", "affine"), settings.get("bits"), settings.get("group_size")

    def shape(self, name: str) -> tuple[int, int]:
        rows, words = self._matrix(f"{name}.weight")
        return rows, words * _WORD_BITS // int(self._settings(name)[1])

    def formats(self, name: str) -> str:
        mode, bits, group = self._settings(name)
        return f"affine{bits}/{group}" if mode == "affine" else str(mode)

    def nearest_format(self, name: str) -> NumberFormat | None:
        mode, bits, group = self._settings(name)
        return NumberFormat(int(bits), int(group), "asymmetric") if mode == "affine" else None

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        mode, bits, group = self._settings(name)
        rows, k = self.shape(name)
        words = self._tensors.take(f"{name}.weight", (torch.uint32,), device=device)
        codes, groups = words.view(torch.int32), (rows, k // group)
        scale = f"{name}.scales"
        if mode == "affine":
            codes = unpack_codes(codes, bits, k)
            scales, biases = (
                self._scales(part, groups, device=device).float().repeat_interleave(group, dim=1)
                for part in (scale, f"{name}.{'q' if self.method == METAL else ''}biases")
            )
            return dequantized(scales * codes + biases)
        number = NumberFormat.parse(mode)
        stored = self._tensors.take(scale, (torch.uint8,), groups, device=device)
        if mode == "nvfp4":
            small = small_scales(stored.view(torch.float8_e4m3fn), scale)
            one = torch.ones(1, device=device)
            return float_operand(unpack_codes(codes, bits, k), small, number, matrix_scale=one)
        powers = power_scales(stored, scale)
        if number.bits == 8:
            return float_operand(codes.view(torch.float8_e4m3fn), powers, number)
        return float_operand(unpack_codes(codes, bits, k), powers, number)

    def _is_part(self, module: str, parameter: str) -> bool:
        stored = f"{module}.scales" in self._tensors
        return stored and (parameter == "weight" or super()._is_part(module, parameter))
