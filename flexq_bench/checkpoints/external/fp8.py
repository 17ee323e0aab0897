"""Folders of `quant_method` fp8: DeepSeek, Qwen3-FP8, MiniMax, and transformers' FineGrainedFP8.

    weight            E4M3 [N, K]
    weight_scale_inv  FP32 or BF16 [ceil(N / rows), ceil(K / columns)], of blocks
                      (`weight_block_size`); of a tensor [1] or []
    weight_scale      the same, in folders of a scale a tensor
    input_scale, activation_scale  FP32 [1] or [], of static activations (`activation_scheme`)

kv_cache_scheme or kv_cache_quant_targets (AutoFP8) ask for a cache of keys and values in E4M3.

W = code · scale: the name means that it is the inverse of the factor that W was multiplied by.
Dynamic activations have a scale a token and block of K, or a token without blocks. With `scale_fmt`
ue8m0 the scales are powers of two, in FP32, and those of activations too.

quant_method fbgemm_fp8 (Llama-3.1-405B-FP8) has weight_scale [N, 1], and bounds the magnitude of
dynamic activations: input_scale_ub, FP32 [1], or `activation_scale_ub`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import float_operand, power_scales
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, DynamicActivation

_FP8 = NumberFormat(8, kind="float")
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_BOUND, _USUAL_BOUND = "input_scale_ub", 1200.0
_POWERS = (torch.uint8, torch.float8_e8m0fnu)


class Fp8Layers(LayerReader):
    """Layers of a folder of quant_method `fp8`.

    Raises CheckpointError for element types other than E4M3, and unknown activation schemes.
    """

    method = "fp8"
    parts = (*_WEIGHT_SCALES, *_INPUT_SCALES, _BOUND)

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        model = tensors.folder.name
        self._scheme = section.get("activation_scheme", "dynamic")
        self._powers = section.get("scale_fmt") == "ue8m0"
        kind = str(section.get("fmt", "e4m3"))
        if self._scheme not in ("dynamic", "static") or kind != "e4m3":
            raise CheckpointError(
                f"{model} is FP8 of {kind} with {self._scheme} activations: read here are e4m3 "
                "with dynamic or static ones"
            )
        block = section.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block)
            and min(block) > 0
        ):  # fmt: skip
            raise CheckpointError(f"{model} has FP8 blocks of {block!r:.40}, expected [128, 128]")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        super().__init__(tensors, section)

    def shape(self, name: str) -> tuple[int, int]:
        return self._matrix(f"{name}.weight")

    def formats(self, name: str) -> str:
        return f"{self._number.name}-{self._input.name}"

    @property
    def _number(self) -> NumberFormat:
        if self._block is None:
            return _FP8
        return NumberFormat(8, self._block[1], "float", block_rows=self._block[0])

    @property
    def _input(self) -> NumberFormat:
        wide = None if self._block is None or self._scheme == "static" else self._block[1]
        return replace(_FP8, group=wide, scale="e8m0" if self._powers and wide else "")

    def has_fp8_cache(self) -> bool:
        return bool(
            self._section.get("kv_cache_scheme") or self._section.get("kv_cache_quant_targets")
        )

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        rows, k = self.shape(name)
        codes = self._tensors.take(f"{name}.weight", (torch.float8_e4m3fn,), device=device)
        scale = next(
            (f"{name}.{part}" for part in _WEIGHT_SCALES if f"{name}.{part}" in self._tensors),
            f"{name}.{_WEIGHT_SCALES[0]}",
        )
        if self._block is None:
            one = self._scales(scale, *ONE, (rows, 1), device=device)
            return float_operand(codes, one.reshape(-1, 1).expand(rows, 1), self._number)
        tall, wide = self._block
        shape = (-(-rows // tall), -(-k // wide))
        if scale in self._tensors and self._tensors.dtype(scale) in _POWERS:
            powers = self._tensors.take(scale, _POWERS, shape, device=device)
            scales = power_scales(powers, scale).float()
        else:
            scales = self._scales(scale, shape, device=device).float()
        return float_operand(codes, scales, self._number)

    def _activation(self, name: str) -> ActivationQuantizer | None:
        if self._scheme == "dynamic":
            return DynamicActivation(self._input)
        names = (f"{name}.{part}" for part in _INPUT_SCALES)
        stored = next((full for full in names if full in self._tensors), f"{name}.input_scale")
        return self._static(self._input, stored)

    def _is_part(self, module: str, parameter: str) -> bool:
        if parameter == "weight":
            return any(f"{module}.{scale}" in self._tensors for scale in _WEIGHT_SCALES)
        return super()._is_part(module, parameter)


class FbgemmLayers(Fp8Layers):
    """Layers of a folder of quant_method `fbgemm_fp8`."""

    method = "fbgemm_fp8"

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        super().__init__(tensors, section)
        bound = section.get("activation_scale_ub", _USUAL_BOUND)
        if not (isinstance(bound, int | float) and 0 < bound < math.inf):
            raise CheckpointError(
                f"{tensors.folder.name} has the activation_scale_ub {bound!r:.40}, expected a "
                "number above 0: copy the folder again"
            )
        self._bound = float(bound)

    def _activation(self, name: str) -> ActivationQuantizer | None:
        bound, stored = self._bound, f"{name}.{_BOUND}"
        if stored in self._tensors:
            bound = float(self._scales(stored, *ONE).item())
        return DynamicActivation(self._input, bound=bound)
