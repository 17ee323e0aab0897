"""BitNet's folders (`quant_method` bitnet): weights of -1, 0 and 1, inputs of 8 bits.

    weight        uint8 [N / 4, K], codes plus 1 of 2 bits, see `unpack_rows`
    weight_scale  [1] or []

linear_class `autobitlinear`: W = code · scale; `bitlinear`: W = code / scale. Inputs are rounded to
INT8 with a scale a token (arXiv 2402.17764).
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.integers import exact_scales, unpack_rows
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, DynamicActivation

_BITS, _PER_BYTE = 2, 4
_LARGEST_CODE = 1
_WEIGHT, _INPUT = NumberFormat(_BITS), NumberFormat(8)


class BitNetLayers(LayerReader):
    """Layers of a folder of quant_method `bitnet`.

    Raises CheckpointError for weights that are rounded at run time, and norms of inputs.
    """

    method = "bitnet"
    parts = ("weight_scale",)

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        for key, value in (("quantization_mode", "online"), ("use_rms_norm", True)):
            if section.get(key) == value:
                raise CheckpointError(
                    f"{tensors.folder.name} is BitNet's with {key} {value}, which is not computed "
                    "here: read are packed weights (quantization_mode offline) without norms"
                )
        super().__init__(tensors, section)

    def shape(self, name: str) -> tuple[int, int]:
        rows, k = self._matrix(f"{name}.weight")
        return rows * _PER_BYTE, k

    def formats(self, name: str) -> str:
        return f"{_WEIGHT.name}-{_INPUT.name}"

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        packed = self._tensors.take(f"{name}.weight", (torch.uint8,), device=device)
        codes = unpack_rows(packed, _BITS, _PER_BYTE).to(torch.int8) - _LARGEST_CODE
        if int(codes.max()) > _LARGEST_CODE:
            raise CheckpointError(f"{name}.weight has codes other than -1, 0 and 1: copy it again")
        scale = self._scales(f"{name}.weight_scale", *ONE, device=device).reshape(1, 1)
        if self._section.get("linear_class", "bitlinear") == "bitlinear":
            scale = exact_scales(1 / scale.float(), name)
        return Operand(codes, scale.expand(codes.shape[0], 1).contiguous(), _BITS, None)

    def _activation(self, name: str) -> ActivationQuantizer | None:
        return DynamicActivation(_INPUT)

    def _is_part(self, module: str, parameter: str) -> bool:
        is_weight = parameter == "weight" and f"{module}.weight_scale" in self._tensors
        return is_weight or super()._is_part(module, parameter)
