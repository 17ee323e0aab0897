"""Folders of llm-compressor: the formats of the compressed-tensors library, versions 0.3 to 0.20.

Its compressors name a layer's tensors (compressed_tensors/compressors) and say what they stand for:

    weight_packed      int32 [N, words], pack-quantized: codes of 2 to 8 bits, from 0 up
    weight_shape       int [2], with it: N and K
    weight             INT8 or E4M3 [N, K]: int-quantized, float-quantized, naive-quantized
    weight_scale       [N, groups]; of channels [N, 1], of a tensor [1], of blocks [blocks]
    weight_zero_point  int32 [words, groups], packed along N, or INT8 [N, groups] (of a tensor [1],
                       and in early versions); none: symmetric
    weight_g_idx       int32 [K], the group of each channel (activation order)
    input_scale        [1], input_zero_point INT8 [1]: of static activations

W = scale · (code - zero point). Version 0.18 began to pack codes across words: before, words of 3,
5, 6 and 7 bits end with unused bits. The width of weight_packed tells which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.compressed_tensors_config import (
    PACKED,
    Arguments,
    read_configuration,
)
from flexq_bench.checkpoints.external.integers import (
    channel_order,
    half_scales,
    integer_operand,
    unpack_whole_codes,
)
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import INTEGERS, REALS, FolderTensors
from flexq_bench.checkpoints.packing import unpack_codes, words_of
from flexq_bench.kernels.formats import Operand
from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
    StaticActivation,
)
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


class CompressedTensorsLayers(LayerReader):
    """Layers of a folder whose `quantization_config` is compressed-tensors'.

    Raises CheckpointError for unsupported formats, sparsity, rotations and KV caches.
    """

    method = "compressed-tensors"
    parts = (
        *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point"),
    )

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._model = tensors.folder.name
        self._config = read_configuration(section, self._model)
        super().__init__(tensors)
        self._groups = {name: self._config.group_of(name, self._model) for name in self.names}

    def shape(self, name: str) -> tuple[int, int]:
        if not self._is_packed(name):
            return self._matrix(f"{name}.weight")
        rows, k = self._tensors.take(f"{name}.weight_shape", INTEGERS, (2,)).tolist()
        if min(rows, k) < 1:
            raise CheckpointError(f"{name}.weight_shape is {[rows, k]}: copy the folder again")
        return rows, k

    def formats(self, name: str) -> str:
        group = self._groups[name]
        assert group.weights is not None  # group_of refuses it
        parts = [group.weights.number(group.weights.length).name]
        inputs = group.input_activations
        if inputs is not None:
            parts.append(inputs.number(inputs.length).name)
        return "-".join(parts)

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        group = self._groups[name]
        assert group.weights is not None  # group_of refuses it
        if self._is_packed(name):
            operand = self._packed_weight(name, group.weights, device)
        else:
            operand = self._plain_weight(name, group.weights, device)
        activation = None
        if group.input_activations is not None:
            activation = self._activation(name, group.input_activations)
        return QuantizedLayer(operand, activation, self._bias(name, operand.rows, device))

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
            if bool(torch.isnan(values.float()).any()):
                raise CheckpointError(f"{name}.weight holds NaN: copy the folder again")
            return Operand(values, scales, bits, group)
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
        """Scales FP16 [N, groups], and values of k in a group; None: one scale per row."""
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
        stored = self._tensors.take(scale, REALS, *shapes, device=device)
        halved = half_scales(stored, scale)
        if weights.scope == "block" and weights.block_structure is not None:
            tall, _ = weights.block_structure
            return halved.repeat_interleave(tall, dim=0)[:rows].contiguous(), group
        return self._over_rows(halved, rows), group

    @staticmethod
    def _over_rows(of_groups: torch.Tensor, rows: int) -> torch.Tensor:
        """[N, groups]; a tensor's single value is repeated for every row."""
        if of_groups.ndim < 2:
            of_groups = of_groups.reshape(-1, 1)
        return of_groups.expand(rows, -1).contiguous()

    def _activation(self, name: str, inputs: Arguments) -> ActivationQuantizer:
        scope = inputs.scope
        if inputs.dynamic and scope in ("token", "group"):
            group = inputs.group_size if scope == "group" else None
            return DynamicActivation(inputs.number(group))
        if inputs.dynamic or scope != "tensor":
            kind = "dynamic" if inputs.dynamic else "static"
            raise CheckpointError(
                f"{name} has {kind} activations with a scale a {scope}: read here are dynamic ones "
                "with a scale a token or group, and static ones with a scale a tensor"
            )
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
        scale_name = f"{name}.input_scale"
        scale = half_scales(self._tensors.take(scale_name, REALS, *shapes), scale_name)
        if not float(scale.item()) > 0:
            raise CheckpointError(f"{scale_name} is {float(scale.item())}: copy the folder again")
        zero = None
        if not inputs.symmetric:
            stored = self._tensors.take(f"{name}.input_zero_point", (torch.int8,), *shapes)
            zero = int(stored.item()) + (1 << (inputs.num_bits - 1))
        return StaticActivation(inputs.number(None), float(scale.item()), zero)

    def _is_packed(self, name: str) -> bool:
        form = self._config.format_of(self._groups[name])
        return f"{name}.weight_packed" in self._tensors if form is None else form == PACKED

    def _is_part(self, module: str, parameter: str) -> bool:
        if parameter == "weight":
            return self._tensors.dtype(f"{module}.weight") in _CODE_DTYPES
        return super()._is_part(module, parameter)

    def _scales(self, name: str) -> Iterator[str]:
        for parameter in ("weight_scale", "input_scale"):
            if f"{name}.{parameter}" in self._tensors:
                yield f"{name}.{parameter}"
