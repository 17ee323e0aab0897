"""AutoAWQ's folders: 4-bit weights with zero points, layout `gemm`.

The layout is that of AutoAWQ 0.2.9 (awq/modules/linear/gemm.py, WQLinear_GEMM):

    qweight  int32 [K, N/8]       eight codes of neighbouring rows in a word
    qzeros   int32 [groups, N/8]  the codes that stand for 0, in the same order
    scales   FP16 [groups, N]

Place i of a word, its bits 4i … 4i + 3, is row 0, 2, 4, 6, 1, 3, 5, 7 of the eight.
W[n, k] = scale · (code - zero).
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.integers import exact_scales, integer_operand
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import HALVES, FolderTensors
from flexq_bench.checkpoints.packing import unpack_codes
from flexq_bench.kernels.formats import NumberFormat, Operand

_BITS = 4
_LAYOUT = "gemm"
_CODES_PER_WORD = 8  # codes
_PLACE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight rows of a word


class AwqLayers(LayerReader):
    """Layers of a folder whose `quantization_config` is AutoAWQ's.

    Raises CheckpointError unless the weights have 4 bits and the layout gemm.
    """

    method = "awq"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._group = section.get("group_size", section.get("q_group_size", 128))
        bits = section.get("bits", section.get("w_bit", _BITS))
        keys = ("version", "checkpoint_format", "format")  # AutoAWQ's key, and two of GPTQModel
        layout = next((str(section[key]).lower() for key in keys if section.get(key)), _LAYOUT)
        if bits != _BITS or layout != _LAYOUT:
            raise CheckpointError(
                f"{tensors.folder.name} is an AWQ checkpoint of {bits} bits in the layout "
                f"{layout}: read here are {_BITS} bits in the layout {_LAYOUT}, which AutoAWQ "
                f"writes with version={_LAYOUT.upper()}"
            )
        if not section.get("zero_point", True) and not any(
            n.endswith(".qzeros") for n in tensors.infos
        ):
            raise CheckpointError(
                f"{tensors.folder.name} has no zero points (qzeros), which the layout {_LAYOUT} "
                "has even where they are all alike: quantize it with zero_point=True"
            )
        if not isinstance(self._group, int) or (self._group < 1 and self._group != -1):
            raise CheckpointError(f"{tensors.folder.name} has AWQ groups of {self._group!r} values")
        super().__init__(tensors, section)

    def shape(self, name: str) -> tuple[int, int]:
        channels, words = self._matrix(f"{name}.qweight")
        return words * _CODES_PER_WORD, channels

    def formats(self, name: str) -> str:
        return NumberFormat(_BITS, self._whole_group, "asymmetric").name

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        rows, k = self.shape(name)
        group = self._whole_group
        groups = 1 if group is None else -(-k // group)
        take = self._tensors.take
        words = take(f"{name}.qweight", (torch.int32,), device=device)
        scales = take(f"{name}.scales", HALVES, (groups, rows), device=device)
        zeros = take(
            f"{name}.qzeros", (torch.int32,), (groups, rows // _CODES_PER_WORD), device=device
        )
        return integer_operand(
            _rows_in_order(words),
            _rows_in_order(zeros),
            exact_scales(scales, f"{name}.scales").T.contiguous(),
            _BITS,
            group,
        )

    @property
    def _whole_group(self) -> int | None:
        return None if self._group == -1 else self._group


def _rows_in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [columns, N/8] to codes, uint8 [N, columns]."""
    columns, count = words.shape
    codes = unpack_codes(words, _BITS, count * _CODES_PER_WORD).view(
        columns, count, _CODES_PER_WORD
    )
    return codes[:, :, list(_PLACE_OF_ROW)].view(columns, -1).T.contiguous()
