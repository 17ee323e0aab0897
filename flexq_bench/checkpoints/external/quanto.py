"""optimum-quanto's folders: `quanto_qmap.json` names the quantized layers and their types.

    weight._data        INT8 or E4M3 [N, K]
    weight._scale       [N, 1]
    input_scale, output_scale  []: 1, unless activations are quantized

W = code · scale. qint4 and qint2 have zero points that are no integers (`_shift`), in an order of
bytes that depends on the library; they are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import float_operand
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand

_NUMBERS = {
    "qint8": NumberFormat(8),
    "qfloat8": NumberFormat(8, kind="float"),
    "qfloat8_e4m3fn": NumberFormat(8, kind="float"),
    "qfloat8_e5m2": NumberFormat(8, kind="float", element="e5m2"),
}
_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class QuantoLayers(LayerReader):
    """Layers of a folder with quanto_qmap.json, whose entries are `section`.

    Raises CheckpointError for other types, and for quantized activations.
    """

    method = "quanto"
    parts = ("input_scale", "output_scale")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._kinds = {key: value for key, value in section.items() if isinstance(value, dict)}
        super().__init__(tensors)
        for name in self.names:
            kind = self._kinds[name].get("weights")
            inputs = self._kinds[name].get("activations", "none")
            if kind not in _NUMBERS or inputs != "none":
                raise CheckpointError(
                    f"{tensors.folder.name}: {name} is optimum-quanto's {kind} with activations "
                    f"{inputs}; read here are {', '.join(_NUMBERS)} without: quantize it as one of "
                    "these, or evaluate the original with --scheme w4a16"
                )

    def shape(self, name: str) -> tuple[int, int]:
        return self._matrix(f"{name}.weight._data")

    def formats(self, name: str) -> str:
        return _NUMBERS[self._kinds[name]["weights"]].name

    def owned(self) -> frozenset[str]:
        named = tuple(f"{name}.weight._" for name in self.names)
        return super().owned() | {n for n in self._tensors.infos if named and n.startswith(named)}

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        number = _NUMBERS[self._kinds[name]["weights"]]
        codes = self._tensors.take(f"{name}.weight._data", _DTYPES, device=device)
        scales = self._scales(f"{name}.weight._scale", (codes.shape[0], 1), device=device)
        if number.kind == "float":
            return float_operand(codes, scales, number)
        return Operand(codes, scales, 8, None)

    def _is_part(self, module: str, parameter: str) -> bool:
        return module in self._kinds and super()._is_part(module, parameter)
