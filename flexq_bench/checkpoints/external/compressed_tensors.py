"""Folders of llm-compressor: the formats of the compressed-tensors library, versions 0.3 to 0.20.

Its compressors name a layer's tensors (compressed_tensors/compressors) and say what they stand for:

    weight_packed      int32 [N, words], pack-quantized: codes of 2 to 8 bits, from 0 up
    weight_shape       int [2], with it: N and K
                       uint8 [N, bytes], nvfp4-, mxfp4- and mxfp6-pack-quantized: floats
    weight             INT8 or E4M3 [N, K]: int-quantized, float-quantized, naive-quantized,
                       mxfp8-quantized
    weight_scale       [N, groups]; of channels [N, 1], of a tensor [1], of blocks [blocks]; of MX
                       formats uint8, the exponent plus 127; of NVFP4 E4M3
    weight_global_scale  FP32 [1], NVFP4: scales are divided by it; input_global_scale: of inputs
    weight_zero_point  int32 [words, groups], packed along N, or INT8 [N, groups] (of a tensor [1],
                       and in early versions); none: symmetric
    weight_g_idx       int32 [K], the group of each channel (activation order)
    input_scale        [1], input_zero_point INT8 [1]: of static activations

W = scale · (code - zero point). Version 0.18 began to pack codes across words: before, words of 3,
5, 6 and 7 bits end with unused bits. The width of weight_packed tells which.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.compressed_tensors_config import (
    NIBBLES,
    PACKED,
    Arguments,
    read_configuration,
)
from flexq_bench.checkpoints.external.floats import (
    float_operand,
    power_scales,
    small_scales,
    unpack_bytes,
)
from flexq_bench.checkpoints.external.integers import (
    channel_order,
    integer_operand,
    unpack_whole_codes,
)
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader
from flexq_bench.checkpoints.folder_tensors import INTEGERS, FolderTensors
from flexq_bench.checkpoints.packing import unpack_codes, words_of
from flexq_bench.kernels.formats import Operand
from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
)

_CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


class CompressedTensorsLayers(LayerReader):
    """Layers of a folder whose `quantization_config` is compressed-tensors'.

    Raises CheckpointError for unsupported formats, sparsity and rotations.
    """

    method = "compressed-tensors"
    parts = (
        *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
    )

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._model = tensors.folder.name
        self._config = read_configuration(section, self._model)
        super().__init__(tensors, section)
        self._groups = {name: self._config.group_of(name, self._model) for name in self.names}

    def shape(self, name: str) -> tuple[int, int]:
        if not self._is_packed(name):
            return self._matrix(f"{name}.weight")
        if f"{name}.weight_shape" not in self._tensors:
            rows, width = self._matrix(f"{name}.weight_packed")
            return rows, width * 8 // self._weights(name).num_bits
        rows, k = self._tensors.take(f"{name}.weight_shape", INTEGERS, (2,)).tolist()
        if min(rows, k) < 1:
            raise CheckpointError(f"{name}.weight_shape is {[rows, k]}: copy the folder again")
        return rows, k

    def formats(self, name: str) -> str:
        inputs = self._groups[name].input_activations
        arguments = [self._weights(name), *([] if inputs is None else [inputs])]
        return "-".join(part.number.name for part in arguments)

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        return self._config.excluded_by(name)

    def has_fp8_cache(self) -> bool:
        return self._config.kv_cache_scheme is not None

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        weights = self._weights(name)
        if weights.is_nv or weights.is_mx:
            return self._small_floats(name, weights, device)
        read = self._packed_weight if self._is_packed(name) else self._plain_weight
        return read(name, weights, device)

    def _weights(self, name: str) -> Arguments:
        weights = self._groups[name].weights
        assert weights is not None  # group_of refuses it
        return weights

    def _small_floats(self, name: str, weights: Arguments, device: torch.device | str) -> Operand:
        take, number = self._tensors.take, weights.number
        rows, k = self.shape(name)
        groups = (rows, -(-k // (number.group or k)))
        if self._is_packed(name):
            packed = take(f"{name}.weight_packed", (torch.uint8,), device=device)
            values = unpack_bytes(packed, number.bits)
        else:
            values = take(f"{name}.weight", (torch.float8_e4m3fn,), device=device)
        scale = f"{name}.weight_scale"
        if weights.is_mx:
            powers = take(scale, (torch.uint8, torch.float8_e8m0fnu), groups, device=device)
            return float_operand(values, power_scales(powers, scale), number)
        scales = small_scales(take(scale, (torch.float8_e4m3fn,), groups, device=device), scale)
        matrix_scale = self._reciprocal(f"{name}.weight_global_scale")
        return float_operand(
            values, scales, number, matrix_scale=torch.tensor([matrix_scale], device=device)
        )

    def _reciprocal(self, name: str) -> float:
        """One over a global scale, FP32."""
        stored = self._tensors.take(name, (torch.float32,), *ONE).reshape(())
        if not bool(torch.isfinite(stored)) or not float(stored) > 0:
            raise CheckpointError(f"{name} is {float(stored)}: copy the folder again")
        return float(1 / stored)

    def _packed_weight(self, name: str, weights: Arguments, device: torch.device | str) -> Operand:
        take = self._tensors.take
        bits = weights.num_bits
        rows, k = self.shape(name)
        dense, whole_codes = words_of(k, bits), -(-k // (32 // bits))
        words = take(
            f"{name}.weight_packed",
            (torch.int32,),
            (rows, dense),
            (rows, whole_codes),
            device=device,
        )
        is_dense = words.shape[1] == dense
        codes = (unpack_codes if is_dense else unpack_whole_codes)(words, bits, k)
        scales, group = self._weight_scales(name, weights, rows, k, device)
        zeros = None
        if not weights.symmetric:
            zero_point = f"{name}.weight_zero_point"
            if zero_point in self._tensors and self._tensors.dtype(zero_point) == torch.int8:
                zeros = self._plain_zeros(name, bits, scales, device)
            else:
                count = words_of(rows, bits) if is_dense else -(-rows // (32 // bits))
                packed = take(
                    zero_point, (torch.int32,), (count, scales.shape[1]), device=device
                ).T.contiguous()
                zeros = (unpack_codes if is_dense else unpack_whole_codes)(packed, bits, rows).T
        return self._integers(name, codes, zeros, scales, bits, group, device)

    def _plain_weight(self, name: str, weights: Arguments, device: torch.device | str) -> Operand:
        take = self._tensors.take
        bits = weights.num_bits
        of_codes = torch.float8_e4m3fn if weights.type == "float" else torch.int8
        rows, k = self.shape(name)
        values = take(f"{name}.weight", (of_codes,), device=device)
        scales, group = self._weight_scales(name, weights, rows, k, device)
        if weights.type == "float":
            number = weights.number
            return float_operand(values, scales[:: number.block_rows or rows], number)
        middle: int = 1 << (bits - 1)
        zeros = None
        if not weights.symmetric:
            zeros = self._plain_zeros(name, bits, scales, device)
        codes = values.to(torch.int16) + middle
        if int(codes.min()) < 0 or int(codes.max()) >= 2 * middle:
            raise CheckpointError(f"{name}.weight holds codes of more than {bits} bits")
        return self._integers(
            name,
            codes.to(torch.uint8),
            zeros,
            scales,
            bits,
            group,
            device,
        )

    def _plain_zeros(
        self, name: str, bits: int, scales: torch.Tensor, device: torch.device | str
    ) -> torch.Tensor:
        """Zero points of one byte each, as uint8 [N, groups] from 0 up."""
        rows, groups = scales.shape
        shared = [(1,), (), (1, 1), (rows,)] if groups == 1 else []
        stored = self._tensors.take(
            f"{name}.weight_zero_point", (torch.int8,), (rows, groups), *shared, device=device
        )
        zeros = self._over_rows(stored, rows).to(torch.int16) + (1 << (bits - 1))
        if int(zeros.min()) < 0 or int(zeros.max()) >= 1 << bits:
            raise CheckpointError(f"{name}.weight_zero_point holds more than {bits} bits")
        return zeros.to(torch.uint8)

    def _integers(
        self,
        name: str,
        codes: torch.Tensor,
        zeros: torch.Tensor | None,
        scales: torch.Tensor,
        bits: int,
        group: int | None,
        device: torch.device | str,
    ) -> Operand:
        order = None
        weights = self._groups[name].weights
        ordered = weights is not None and weights.has_group_order
        if group is not None and (ordered or f"{name}.weight_g_idx" in self._tensors):
            of_channel = self._tensors.take(
                f"{name}.weight_g_idx", INTEGERS, (codes.shape[1],), device=device
            )
            if int(of_channel.min()) >= 0:  # -1: initialized, but never set
                order = channel_order(of_channel, group, name)
        if order is not None:
            codes = codes[:, order.long()]
        zeros = None if zeros is None else zeros.contiguous()
        return integer_operand(codes, zeros, scales, bits, group, order)

    def _weight_scales(
        self, name: str, weights: Arguments, rows: int, k: int, device: torch.device | str
    ) -> tuple[torch.Tensor, int | None]:
        """Scales [N, groups], and values of k in a group; None: one scale per row."""
        scale = f"{name}.weight_scale"
        match weights.scope:
            case "tensor":
                shapes, group = [(1,), (), (1, 1)], None
            case "channel":
                shapes, group = [(rows, 1), (rows,)], None
            case "group" if weights.group_size is not None and weights.group_size > 0:
                group = weights.group_size
                shapes = [(rows, -(-k // group))]
            case "block" if weights.block_structure is not None:
                tall, group = weights.block_structure
                shapes = [(-(-rows // tall), -(-k // group))]
            case scope:
                raise CheckpointError(
                    f"{name} has weights with a scale a {scope} of {weights.group_size}: read here "
                    "are tensor, channel, group and block"
                )
        stored = self._scales(scale, *shapes, device=device)
        if weights.scope == "block" and weights.block_structure is not None:
            tall, _ = weights.block_structure
            return stored.repeat_interleave(tall, dim=0)[:rows].contiguous(), group
        return self._over_rows(stored, rows), group

    @staticmethod
    def _over_rows(of_groups: torch.Tensor, rows: int) -> torch.Tensor:
        """[N, groups]; a tensor's single value is repeated for every row."""
        if of_groups.ndim < 2:
            of_groups = of_groups.reshape(-1, 1)
        return of_groups.expand(rows, -1).contiguous()

    def _activation(self, name: str) -> ActivationQuantizer | None:
        inputs = self._groups[name].input_activations
        if inputs is None:
            return None
        scope, number = inputs.scope, inputs.number
        if inputs.is_nv and inputs.dynamic:
            return DynamicActivation(number, self._reciprocal(f"{name}.input_global_scale"))
        if inputs.dynamic and scope in ("token", "group"):
            return DynamicActivation(number)
        if inputs.dynamic or scope != "tensor":
            kind = "dynamic" if inputs.dynamic else "static"
            raise CheckpointError(
                f"{name} has {kind} activations with a scale a {scope}: read here are dynamic ones "
                "with a scale a token or group, and static ones with a scale a tensor"
            )
        zero = None if inputs.symmetric else f"{name}.input_zero_point"
        return self._static(number, f"{name}.input_scale", zero)

    def _is_packed(self, name: str) -> bool:
        form = self._config.format_of(self._groups[name])
        return (
            f"{name}.weight_packed" in self._tensors if form is None else form in (PACKED, *NIBBLES)
        )

    def _is_part(self, module: str, parameter: str) -> bool:
        if parameter == "weight":
            return self._tensors.dtype(f"{module}.weight") in _CODE_DTYPES
        return super()._is_part(module, parameter)
