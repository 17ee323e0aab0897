"""torchao's safetensors folders (`quant_method` torchao), of versions 0.15 to 0.18.

The tensors of a quantized weight are stored separately, and its class in the file's metadata
(torchao/prototype/safetensors):

    _weight_qdata       the codes: INT8 or E4M3 [N, K], or uint8 [N, K / 2]
    _weight_scale       [N, groups], or of blocks; of MX and NVFP4 maybe in cuBLAS' order of blocks
    _weight_zero_point  INT8 [N, groups]
    _weight_per_tensor_scale, _weight_act_per_tensor_scale  FP32 [], of NVFP4

Classes: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MXTensor, NVFP4Tensor.
W = scale · (code - zero point).
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import (
    float_operand,
    power_scales,
    small_scales,
    unpack_bytes,
)
from flexq_bench.checkpoints.external.integers import integer_operand
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader, format_names
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.checkpoints.safetensors_io import read_metadata
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, DynamicActivation

_WEIGHT = "_weight_"
_BLOCK_ROWS, _BLOCK_COLUMNS = 128, 4  # scales that cuBLAS reads together
_FLOATS = {"float8_e4m3fn": "mxfp8", "float4_e2m1fn_x2": "mxfp4"}
_INTEGERS = {"Int8Tensor", "IntxUnpackedToInt8Tensor"}
_CLASSES = (*sorted(_INTEGERS), "Float8Tensor", "MXTensor", "NVFP4Tensor")


class TorchAoLayers(LayerReader):
    """Layers of a folder of quant_method `torchao`.

    Raises CheckpointError for classes whose layout depends on a GPU, or that are unknown.
    """

    method = "torchao"
    parts = tuple(
        f"{_WEIGHT}{part}"
        for part in ("qdata", "scale", "zero_point", "per_tensor_scale", "act_per_tensor_scale")
    )

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        super().__init__(tensors, section)
        self.names_all = "fqn" not in json.dumps(section, default=str)  # settings by full names
        metadata: dict[str, str] = {}
        for path in sorted({info.path for info in tensors.infos.values()}):
            metadata |= read_metadata(path)
        self._described = {name: self._description(metadata, name) for name in self.names}

    def _description(self, metadata: dict[str, str], name: str) -> dict[str, Any]:
        try:
            described = json.loads(metadata[f"{name}.weight"])
            kind, values = described["_type"], described["_data"]
            assert isinstance(values, dict)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise CheckpointError(
                f"{self._tensors.folder.name}: no file's metadata describes {name}.weight: save it "
                "with transformers and a torchao of 0.15 or later"
            ) from error
        if kind not in _CLASSES:
            raise CheckpointError(
                f"{self._tensors.folder.name}: {name} is torchao's {kind}; read here are "
                f"{', '.join(_CLASSES)}"
            )
        return {"class": kind, **values}

    def shape(self, name: str) -> tuple[int, int]:
        rows, width = self._matrix(f"{name}.{_WEIGHT}qdata")
        is_packed = self._tensors.dtype(f"{name}.{_WEIGHT}qdata") == torch.uint8
        return rows, width * 2 if is_packed else width

    def formats(self, name: str) -> str:
        return format_names(self._number(name), self._activation(name))

    def _number(self, name: str) -> NumberFormat:
        described, (rows, k) = self._described[name], self.shape(name)
        match described["class"]:
            case "NVFP4Tensor":
                return NumberFormat.parse("nvfp4")
            case "MXTensor":
                return NumberFormat.parse(self._chosen(_FLOATS, described["elem_dtype"], name))
        tall, wide = described["block_size"]
        group = None if wide == k else int(wide)
        if described["class"] == "Float8Tensor":
            height = 1 if (tall, group) == (rows, None) or tall == 1 else int(tall)
            return NumberFormat(8, group, "float", block_rows=height)
        kind = described.get("target_dtype", {"_data": "int8"})
        bits = self._chosen({f"int{b}": b for b in range(2, 9)}, kind, name)
        return NumberFormat(bits, group)

    def _chosen(self, known: dict[str, Any], stored: Any, name: str) -> Any:
        """A value by the name of a torch dtype in the metadata."""
        kind = stored.get("_data") if isinstance(stored, dict) else stored
        if kind not in known:
            raise CheckpointError(f"{name} has codes of torchao's {kind}, which is not read here")
        return known[kind]

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        described, number = self._described[name], self._number(name)
        data, scale = f"{name}.{_WEIGHT}qdata", f"{name}.{_WEIGHT}scale"
        codes = self._tensors.take(
            data, (torch.int8, torch.uint8, torch.float8_e4m3fn), device=device
        )
        rows, k = self.shape(name)
        groups = -(-k // (number.group or k))
        if described["class"] in _INTEGERS:
            scales = self._scales(scale, (rows, groups), (rows,), device=device)
            return self._integers(name, codes, scales.reshape(rows, -1), number)
        if described["class"] == "Float8Tensor":
            blocks = -(-rows // (number.block_rows or rows))
            scales = self._scales(scale, (blocks, groups), *ONE, device=device)
            return float_operand(codes, scales.reshape(-1, groups).expand(blocks, groups), number)
        values = unpack_bytes(codes, number.bits) if codes.dtype == torch.uint8 else codes
        kinds = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)
        stored = self._tensors.take(scale, kinds, device=device)
        if described.get("is_swizzled_scales"):
            stored = in_rows(stored, rows, groups)
        if tuple(stored.shape) != (rows, groups):
            raise CheckpointError(f"{scale} is {list(stored.shape)}, expected {[rows, groups]}")
        if number.scale == "e8m0":
            return float_operand(values, power_scales(stored, scale), number)
        whole = f"{name}.{_WEIGHT}per_tensor_scale"
        one = (
            self._scales(whole, *ONE, device=device).float().reshape(1)
            if whole in self._tensors
            else torch.ones(1, device=device)
        )
        return float_operand(values, small_scales(stored, scale), number, matrix_scale=one)

    def _integers(
        self, name: str, codes: torch.Tensor, scales: torch.Tensor, number: NumberFormat
    ) -> Operand:
        middle, zero = 1 << (number.bits - 1), f"{name}.{_WEIGHT}zero_point"
        zeros = None
        if zero in self._tensors:
            stored = self._tensors.take(zero, (torch.int8, torch.int32, torch.int64))
            shifted = stored.to(codes.device).reshape(scales.shape).to(torch.int32) + middle
            zeros = self._in_range(shifted, number, zero)
        shifted = codes.to(torch.int32) + middle
        return integer_operand(
            self._in_range(shifted, number, f"{name}.{_WEIGHT}qdata"),
            zeros, scales, number.bits, number.group,
        )  # fmt: skip

    def _in_range(self, codes: torch.Tensor, number: NumberFormat, name: str) -> torch.Tensor:
        if int(codes.min()) < 0 or int(codes.max()) >= 1 << number.bits:
            raise CheckpointError(f"{name} holds codes of more than {number.bits} bits")
        return codes.to(torch.uint8)

    def _activation(self, name: str) -> ActivationQuantizer | None:
        described = self._described[name]
        own = described.get("activation_quantization")
        kind = own.get("_data") if isinstance(own, dict) else own
        if kind == "INT8_ASYM_PER_TOKEN" or kind == "int8_asym_per_token":
            return DynamicActivation(NumberFormat(8, None, "asymmetric"))
        inputs = (described.get("act_quant_kwargs") or {}).get("_data")
        if inputs is None and kind is None:
            return None
        inputs = inputs or {}
        if described["class"] == "MXTensor":
            return DynamicActivation(
                NumberFormat.parse(self._chosen(_FLOATS, inputs["elem_dtype"], name))
            )
        if described["class"] == "NVFP4Tensor":
            whole = f"{name}.{_WEIGHT}act_per_tensor_scale"
            scale = float(self._scales(whole, *ONE).float()) if whole in self._tensors else 1.0
            return DynamicActivation(NumberFormat.parse("nvfp4"), scale)
        granularity = (inputs.get("granularity") or {}).get("_type")
        symmetric = (inputs.get("mapping_type") or {"_data": "SYMMETRIC"}).get("_data")
        if granularity != "PerRow" or symmetric != "SYMMETRIC":
            raise CheckpointError(
                f"{name} has torchao's activations of {granularity}, {symmetric}: read here are "
                "PerRow, SYMMETRIC"
            )
        floats = described["class"] == "Float8Tensor"
        return DynamicActivation(NumberFormat(8, kind="float") if floats else NumberFormat(8))


def in_rows(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Scales [rows, groups] from cuBLAS' order: blocks of 128 x 4, each as 32 rows of 16.

    cuBLAS' documentation, "1D block scaling factors layout". Raises CheckpointError if they are
    too few.
    """
    tall, wide = -(-rows // _BLOCK_ROWS), -(-groups // _BLOCK_COLUMNS)
    if scales.numel() != tall * _BLOCK_ROWS * wide * _BLOCK_COLUMNS:
        raise CheckpointError(f"{scales.numel()} scales are none of {rows} rows of {groups} groups")
    codes = scales.view(torch.uint8).reshape(tall, wide, 32, 4, _BLOCK_COLUMNS)
    plain = codes.permute(0, 3, 2, 1, 4).reshape(tall * _BLOCK_ROWS, wide * _BLOCK_COLUMNS)
    return plain[:rows, :groups].contiguous().view(scales.dtype)
