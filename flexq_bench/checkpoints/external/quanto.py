"""optimum-quanto's folders: `quanto_qmap.json` names the quantized layers and their types.

    weight._data        INT8 or E4M3 [N, K]
    weight._scale       [N, 1]
    weight._data._data  qint4, qint2: uint8 [groups / codes of a byte, group], see `unpack_rows`
    weight._scale, weight._shift  of these: [N · K / group, 1], groups of the weights in one row
    input_scale, output_scale  []: 1, unless activations are quantized

W = code · scale; of qint4 and qint2 code · scale - shift. A shift is no multiple of its scale, so
that no zero point stands for it: such weights are read as the FP32 numbers that they stand for.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import dequantized, float_operand
from flexq_bench.checkpoints.external.integers import unpack_rows
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand

_NUMBERS = {
    "qint8": NumberFormat(8),
    "qfloat8": NumberFormat(8, kind="float"),
    "qfloat8_e4m3fn": NumberFormat(8, kind="float"),
    "qfloat8_e5m2": NumberFormat(8, kind="float", element="e5m2"),
}
_SMALL = {"qint4": 4, "qint2": 2}  # bits
_BYTE_BITS = 8
_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class QuantoLayers(LayerReader):
    """Layers of a folder with quanto_qmap.json, whose entries are `section`.

    Raises CheckpointError for other types, and for quantized activations.
    """

    method = "quanto"
    parts = ("input_scale", "output_scale")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        self._kinds = {key: value for key, value in section.items() if isinstance(value, dict)}
        super().__init__(tensors, section)
        self.check_excluded()
        for name in self.names:
            kind = self._kinds[name].get("weights")
            inputs = self._kinds[name].get("activations", "none")
            if kind not in (*_NUMBERS, *_SMALL) or inputs != "none":
                raise CheckpointError(
                    f"{tensors.folder.name}: {name} is optimum-quanto's {kind} with activations "
                    f"{inputs}; read here are {', '.join((*_NUMBERS, *_SMALL))} without: quantize "
                    "it as one of these"
                )

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        return "" if name in self._kinds else "not in quanto_qmap.json"

    def shape(self, name: str) -> tuple[int, int]:
        bits = _SMALL.get(self._kinds[name]["weights"])
        if bits is None:
            return self._matrix(f"{name}.weight._data")
        rows, columns = self._matrix(f"{name}.weight._data._data")
        n, k = self.expected.get(name, (0, 0))
        if n * k != rows * columns * (_BYTE_BITS // bits):
            raise CheckpointError(
                f"{self._tensors.folder.name}: {name} has {rows * columns} bytes of {bits} bits, "
                f"its config.json asks for {[n, k]}: copy the folder again"
            )
        return n, k

    def formats(self, name: str) -> str:
        kind = str(self._kinds[name]["weights"])
        return _NUMBERS[kind].name if kind in _NUMBERS else kind

    def nearest_format(self, name: str) -> NumberFormat | None:
        bits, (rows, k) = _SMALL.get(self._kinds[name]["weights"]), self.shape(name)
        groups = self._tensors.shape(f"{name}.weight._scale")[0]
        return None if bits is None else NumberFormat(bits, rows * k // groups, "asymmetric")

    def owned(self) -> frozenset[str]:
        named = tuple(f"{name}.weight._" for name in self.names)
        return super().owned() | {n for n in self._tensors.infos if named and n.startswith(named)}

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        kind = self._kinds[name]["weights"]
        if kind in _SMALL:
            return dequantized(self._small(name, _SMALL[kind], device).view(self.shape(name)))
        number = _NUMBERS[kind]
        codes = self._tensors.take(f"{name}.weight._data", _DTYPES, device=device)
        scales = self._scales(f"{name}.weight._scale", (codes.shape[0], 1), device=device)
        if number.kind == "float":
            return float_operand(codes, scales, number)
        return Operand(codes, scales, 8, None)

    def _small(self, name: str, bits: int, device: torch.device | str) -> torch.Tensor:
        """FP32 values of 4 or 2 bits, [groups, group]."""
        take, per_byte = self._tensors.take, _BYTE_BITS // bits
        packed = take(f"{name}.weight._data._data", (torch.uint8,), device=device)
        groups = (packed.shape[0] * per_byte, 1)
        scales = self._scales(f"{name}.weight._scale", groups, device=device).float()
        shift = take(f"{name}.weight._shift", REALS, groups, device=device).float()
        return scales * unpack_rows(packed, bits, per_byte) - shift

    def _is_part(self, module: str, parameter: str) -> bool:
        return module in self._kinds and super()._is_part(module, parameter)
