"""HQQ's folders as transformers stores them (`quant_method` hqq), of HQQ 0.2.2 and later.

    W_q          8, 4, 2 and 1 bits: uint8 [rows / codes of a byte, columns]; 3 bits: int32, ten
                 codes in a word; the first rows in the highest bits
    scale, zero  [groups, 1] of groups of neighbouring columns (`axis` 1), or [1, groups]
    nbits, axis, shape, packing, view_as_float  the settings of the layer, as small tensors

W = (code - zero) · scale, in the type of the scales. Zero points are no integers: such weights are
read as the numbers that they stand for, and no kernel runs them. HQQ's own folders are pickled
(qmodel.pt) and refused.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import dequantized
from flexq_bench.checkpoints.external.integers import unpack_rows
from flexq_bench.checkpoints.external.layer_reader import ONE, LayerReader
from flexq_bench.checkpoints.folder_tensors import INTEGERS, REALS, FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand

_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # codes of a byte, or of a word of 32 bits, by bits
_SETTINGS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "channel_wise", "optimize", "round_zero"),
    *("offload_meta", "encoded_state_dict", "stores_quant_config"),
)


class HqqLayers(LayerReader):
    """Layers of a folder of quant_method `hqq`.

    Raises CheckpointError for pickled folders, codes viewed as floats, and quantized scales.
    """

    method = "hqq"
    parts = ("W_q", "scale", "zero", *_SETTINGS)

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        super().__init__(tensors, section)
        for name in self.names:
            bits, axis = self._number(name, "nbits"), self._number(name, "axis")
            is_float = self._tensors.dtype(f"{name}.W_q").is_floating_point
            if bits not in _PER_WORD or axis not in (0, 1) or is_float:
                raise CheckpointError(
                    f"{tensors.folder.name}: {name} has HQQ's codes of {bits} bits along axis "
                    f"{axis} as {self._tensors.dtype(f'{name}.W_q')}: read here are "
                    f"{', '.join(map(str, _PER_WORD))} bits as integers (view_as_float=False)"
                )

    def shape(self, name: str) -> tuple[int, int]:
        rows, k = self._tensors.take(f"{name}.shape", INTEGERS, (2,)).tolist()
        return int(rows), int(k)

    def formats(self, name: str) -> str:
        rows, k = self.shape(name)
        groups = max(self._tensors.shape(f"{name}.scale"))
        return f"hqq{self._number(name, 'nbits')}/{rows * k // groups}"

    def nearest_format(self, name: str) -> NumberFormat | None:
        bits, _, group = self.formats(name).removeprefix(self.method).partition("/")
        return NumberFormat(max(2, int(bits)), int(group), "asymmetric")

    def _number(self, name: str, setting: str) -> int:
        dtypes = (*INTEGERS, torch.uint8)
        return int(self._tensors.take(f"{name}.{setting}", dtypes, *ONE).item())

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        (rows, k), bits = self.shape(name), self._number(name, "nbits")
        words = self._tensors.take(f"{name}.W_q", (torch.uint8, torch.int32), device=device)
        scale = self._tensors.take(f"{name}.scale", REALS, device=device)
        zero = self._tensors.take(f"{name}.zero", REALS, tuple(scale.shape), device=device)
        per_word = _PER_WORD[bits]
        parts = unpack_rows(words, bits, per_word).view(per_word, *words.shape)
        codes = parts.flip(0).flatten(0, 1)
        is_along_k = self._number(name, "axis") == 1
        groups = scale.shape[0] if is_along_k else scale.shape[1]
        codes = codes[: groups if is_along_k else rows * k // max(groups, 1)]
        if codes.numel() != rows * k or scale.numel() != groups:
            raise CheckpointError(
                f"{name} has {codes.numel()} codes and {list(scale.shape)} scales, expected a "
                f"matrix {[rows, k]}: copy the folder again"
            )
        return dequantized(((codes.to(scale.dtype) - zero) * scale).reshape(rows, k))
