"""Folders of NVIDIA's Model Optimizer 0.19 to 0.47: `quant_method` modelopt, hf_quant_config.json.

The layout of its unified checkpoint (modelopt/torch/export/quant_utils.py), by `quant_algo`:

    FP8                         weight E4M3 [N, K], weight_scale FP32 [], input_scale FP32 []
    FP8_PER_CHANNEL_PER_TOKEN   weight E4M3, weight_scale [N]; dynamic activations
    FP8_PB_WO                   weight E4M3, weight_scale [row blocks, (1,) blocks(, 1)]
    MXFP8                       weight E4M3, weight_scale uint8 [N, K / 32]
    NVFP4, W4A16_NVFP4, NVFP4_AWQ  weight uint8 [N, K / 2], weight_scale E4M3 [N, K / 16],
                                weight_scale_2 FP32 [] multiplies it; input_scale FP32 []
    W4A16_AWQ, W4A8_AWQ         weight uint8 [N / 2, K], two rows in a byte, weight_scale
                                [N, K / group]; W4A8: rounded to E4M3 times weight_scale_2 []
    W8A16, W8A8_SQ_PER_CHANNEL  weight INT8 [N, K], weight_scale [N]; dynamic activations
    pre_quant_scale             [K], multiplies the input first (AWQ)

W = code · weight_scale · weight_scale_2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import (
    float_operand,
    power_scales,
    small_scales,
    unpack_bytes,
)
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader, format_names
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.kernels.formats import FLOAT_TYPES, NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, DynamicActivation
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.rotation import ChannelScales

_FP8, _INT8 = NumberFormat(8, kind="float"), NumberFormat(8)
_NVFP4, _MXFP8 = NumberFormat.parse("nvfp4"), NumberFormat.parse("mxfp8")
_NV = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
_STATIC = ("FP8", "W4A8_AWQ")
_INT4 = ("W4A16_AWQ", "W4A8_AWQ")
_KNOWN = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "W8A16", "W8A8_SQ_PER_CHANNEL"),
    *(*_NV, *_INT4),
)
_GROUP, _BLOCK = 128, (128, 128)
_CACHES = (None, "FP8")


class ModelOptLayers(LayerReader):
    """Layers of a folder of quant_method `modelopt`.

    section: of config.json, or `quantization` of hf_quant_config.json. Raises CheckpointError for
    other algorithms, and other KV caches than FP8.
    """

    method = "modelopt"
    parts = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        nested = section.get("quantization")
        own = {**section, **(nested if isinstance(nested, dict) else {})}
        super().__init__(tensors, own)
        self.check_excluded()  # before its algorithm is missed
        self._algorithms = {name: self._algorithm(name) for name in self.names}
        cache = own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme")
        if isinstance(cache, dict):
            cache = "FP8" if (cache.get("type"), cache.get("num_bits")) == ("float", 8) else cache
        if cache not in _CACHES:
            raise CheckpointError(
                f"{tensors.folder.name} caches keys and values as {cache}: read here is FP8"
            )
        self._has_cache = cache is not None

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        layers = self._section.get("quantized_layers")
        if isinstance(layers, dict) and name not in layers:
            return "quantized_layers"
        return super().excluded_by(name, loosely=loosely)

    def _settings(self, name: str) -> dict[str, Any]:
        layers = self._section.get("quantized_layers")
        own = layers.get(name) if isinstance(layers, dict) else None
        return {**self._section, **(own if isinstance(own, dict) else {})}

    def _algorithm(self, name: str) -> str:
        algorithm = str(self._settings(name).get("quant_algo")).upper()
        if algorithm not in _KNOWN:
            raise CheckpointError(
                f"{self._tensors.folder.name}: {name} is modelopt's {algorithm}; read here are "
                f"{', '.join(_KNOWN)}"
            )
        return algorithm

    def has_fp8_cache(self) -> bool:
        return self._has_cache

    def shape(self, name: str) -> tuple[int, int]:
        rows, k = self._matrix(f"{name}.weight")
        if self._algorithms[name] in _NV:
            return rows, 2 * k
        return (2 * rows, k) if self._algorithms[name] in _INT4 else (rows, k)

    def formats(self, name: str) -> str:
        return format_names(self._number(name), self._activation(name))

    def _number(self, name: str) -> NumberFormat:
        match self._algorithms[name]:
            case "FP8_PB_WO":
                return replace(_FP8, group=_BLOCK[1], block_rows=_BLOCK[0], scale="fp32")
            case "MXFP8":
                return _MXFP8
            case "W8A16" | "W8A8_SQ_PER_CHANNEL":
                return _INT8
            case algorithm if algorithm in _NV:
                return _NVFP4
            case "W4A16_AWQ":
                return NumberFormat(4, int(self._settings(name).get("group_size") or _GROUP))
        return _FP8

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        algorithm, number = self._algorithms[name], self._number(name)
        rows, k = self.shape(name)
        take, scale = self._tensors.take, f"{name}.weight_scale"
        groups = (rows, -(-k // (number.group or k)))
        if algorithm in _INT4:
            return self._four_bits(name, device)
        of_codes = {_NVFP4: torch.uint8, _INT8: torch.int8}.get(number, torch.float8_e4m3fn)
        codes = take(f"{name}.weight", (of_codes,), device=device)
        if number == _NVFP4:
            scales = take(scale, (torch.float8_e4m3fn,), groups, device=device)
            outer = self._scales(f"{name}.weight_scale_2", *ONE, device=device)
            values = unpack_bytes(codes, _NVFP4.bits)
            outer = outer.float().reshape(1)
            return float_operand(values, small_scales(scales, scale), number, matrix_scale=outer)
        if number == _MXFP8:
            powers = take(scale, (torch.uint8, torch.float8_e8m0fnu), groups, device=device)
            return float_operand(codes, power_scales(powers, scale), number)
        if number.block_rows != 1:
            blocks = (-(-rows // _BLOCK[0]), groups[1])
            shapes = (blocks, (blocks[0], 1, blocks[1], 1), *(ONE if blocks == (1, 1) else ()))
            stored = self._scales(scale, *shapes, device=device)
            return float_operand(codes, stored.float().reshape(blocks), number)
        scales = self._scales(scale, *ONE, (rows,), (rows, 1), device=device)
        scales = scales.reshape(-1, 1).expand(rows, 1)
        if number == _INT8:
            return Operand(codes, scales.contiguous(), number.bits, None)
        return float_operand(codes, scales, number)

    def _four_bits(self, name: str, device: torch.device | str) -> Operand:
        """Integers in groups; of W4A8 as E4M3, to which the tool rounds code times scale."""
        group = int(self._settings(name).get("group_size") or _GROUP)
        (rows, k), scale = self.shape(name), f"{name}.weight_scale"
        packed = self._tensors.take(f"{name}.weight", (torch.uint8,), device=device)
        unsigned = torch.stack([packed & 15, packed >> 4], dim=1).reshape(rows, k).to(torch.int8)
        codes = torch.where(unsigned > 7, unsigned - 16, unsigned)
        scales = self._scales(scale, (rows, -(-k // group)), device=device)
        integers = Operand(codes, scales, 4, group)
        outer = f"{name}.weight_scale_2"
        if self._algorithms[name] == "W4A16_AWQ":
            return integers
        whole = self._scales(outer, *ONE, device=device).float().reshape(1, 1)
        e4m3 = FLOAT_TYPES["e4m3"]
        numbers = e4m3.nearest(integers.dequantize() / whole.double()).to(e4m3.dtype)
        return float_operand(numbers, whole.expand(rows, 1), _FP8)

    def _activation(self, name: str) -> ActivationQuantizer | None:
        algorithm, scale = self._algorithms[name], f"{name}.input_scale"
        if algorithm not in (*_STATIC, *_NV[:2]) and scale in self._tensors:
            raise CheckpointError(
                f"{self._tensors.folder.name}: {name} has an input_scale, and {algorithm} has "
                "none: check quant_algo"
            )
        if algorithm in ("FP8_PB_WO", "W4A16_NVFP4", "W4A16_AWQ", "W8A16"):
            return None
        if algorithm in _STATIC:
            return self._static(_FP8, scale)
        if algorithm in _NV:
            outer = float(self._scales(scale, *ONE).float()) if scale in self._tensors else None
            return DynamicActivation(_NVFP4, outer)
        dynamic = {"MXFP8": _MXFP8, "FP8_PER_CHANNEL_PER_TOKEN": _FP8}
        return DynamicActivation(dynamic.get(algorithm, _INT8))

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        layer, scale = super().layer(name, device), f"{name}.pre_quant_scale"
        if scale not in self._tensors:
            return layer
        stored = self._tensors.take(scale, REALS, (layer.weight.k,), device=device).float()
        if not bool(torch.isfinite(stored).all()) or not bool((stored > 0).all()):
            raise CheckpointError(f"{scale} holds NaN, infinity or 0: copy it again")
        return replace(layer, rotation=ChannelScales(stored))

    def _is_part(self, module: str, parameter: str) -> bool:
        if parameter == "weight":
            return f"{module}.weight_scale" in self._tensors
        return super()._is_part(module, parameter)
