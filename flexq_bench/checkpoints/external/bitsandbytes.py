"""bitsandbytes' folders as transformers stores them: INT8 of LLM.int8(), and NF4 and FP4 in blocks.

8 bits (bitsandbytes/nn/modules.py, Linear8bitLt):

    weight  INT8 [N, K]    SCB  FP32 [N], the largest magnitude of a row    W = code · SCB / 127

Inputs are rounded to INT8 with a scale a token, except for columns with a value of at least
`llm_int8_threshold`, which stay as they are (LLM.int8(), arXiv 2208.07339).

4 bits (bitsandbytes/functional.py, QuantState), codes of the matrix in one row, the first in the
high half of a byte:

    weight                              uint8 [N · K / 2, 1]
    weight.quant_map                    FP32 [16], the number of each code
    weight.absmax                       FP32 [blocks]; nested: uint8 codes of
    weight.nested_absmax, …_quant_map   FP32 [blocks of blocks], [256]
    weight.quant_state.bitsandbytes__…  JSON: shape, blocksize, nested_blocksize, nested_offset

No kernel here multiplies such codes; they are read as the FP32 numbers that they stand for.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import dequantized
from flexq_bench.checkpoints.external.integers import exact_scales
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.schemes.activations import ActivationQuantizer, OutlierActivation

_INT8 = NumberFormat(8)
_STATE = ".quant_state.bitsandbytes__"
_THRESHOLD = 6.0  # the tool's default


class BitsAndBytesLayers(LayerReader):
    """Layers of a folder of quant_method `bitsandbytes`.

    Raises CheckpointError for codes stored in other types than bytes.
    """

    method = "bitsandbytes"
    parts = ("SCB", "weight_format")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        states = [name for name in tensors.infos if _STATE in name]
        # Modules by the name of the tensor that describes their codes.
        self._states = {name.partition(f".weight{_STATE}")[0]: name for name in states}
        self._described: dict[str, dict[str, Any]] = {}
        threshold = section.get("llm_int8_threshold")
        self._threshold = float(_THRESHOLD if threshold is None else threshold)
        super().__init__(tensors, section)

    def shape(self, name: str) -> tuple[int, int]:
        if name not in self._states:
            return self._matrix(f"{name}.weight")
        rows, k = self._state(name)["shape"]
        return int(rows), int(k)

    def formats(self, name: str) -> str:
        if name not in self._states:
            return f"{_INT8.name}-{_INT8.name}"
        state = self._state(name)
        return f"{state['quant_type']}/{state['blocksize']}"

    def nearest_format(self, name: str) -> NumberFormat | None:
        if name not in self._states:
            return None
        return NumberFormat(4, int(self._state(name)["blocksize"]), "float")

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        rows, k = self.shape(name)
        if name not in self._states:
            codes = self._tensors.take(f"{name}.weight", (torch.int8,), device=device)
            largest = self._tensors.take(f"{name}.SCB", (torch.float32,), (rows,), device=device)
            scales = exact_scales(largest[:, None] / 127, f"{name}.SCB")
            return Operand(codes, scales, 8, None)
        state, take = self._state(name), self._tensors.take
        packed = take(f"{name}.weight", (torch.uint8,), device=device).flatten()
        numbers = take(f"{name}.weight.quant_map", (torch.float32,), (16,), device=device)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
        size = int(state["blocksize"])
        scales = self._block_scales(name, state, -(-rows * k // size), device)
        if codes.numel() < rows * k or codes.numel() > rows * k + 1:
            raise CheckpointError(f"{name}.weight has {codes.numel()} codes, expected {rows * k}")
        values = numbers[codes[: rows * k].int()]
        return dequantized((values * scales.repeat_interleave(size)[: rows * k]).view(rows, k))

    def _block_scales(
        self, name: str, state: dict[str, Any], blocks: int, device: torch.device | str
    ) -> torch.Tensor:
        """The FP32 scale of each block."""
        take, scale = self._tensors.take, f"{name}.weight.absmax"
        if "nested_blocksize" not in state:
            return take(scale, (torch.float32,), (blocks,), device=device)
        size = int(state["nested_blocksize"])
        codes = take(scale, (torch.uint8,), (blocks,), device=device)
        of_codes = (torch.float32,)
        numbers = take(f"{name}.weight.nested_quant_map", of_codes, (256,), device=device)
        outer = take(f"{name}.weight.nested_absmax", of_codes, (-(-blocks // size),), device=device)
        wide = outer.repeat_interleave(size)[:blocks]
        return numbers[codes.int()] * wide + float(state["nested_offset"])

    def _activation(self, name: str) -> ActivationQuantizer | None:
        return None if name in self._states else OutlierActivation(_INT8, self._threshold)

    def _state(self, name: str) -> dict[str, Any]:
        if name not in self._described:
            stored = self._tensors.take(self._states[name], (torch.uint8,))
            try:
                state = json.loads(bytes(stored.tolist()))
                usable = len(state["shape"]) == 2 and int(state["blocksize"]) > 0
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{self._states[name]} is no description of codes: copy the folder again"
                ) from error
            if not usable:
                raise CheckpointError(f"{name} has bitsandbytes' codes of {state['shape']}")
            self._described[name] = state
        return self._described[name]

    def _is_part(self, module: str, parameter: str) -> bool:
        return super()._is_part(module, parameter) or (
            parameter == "weight" and (module in self._states or f"{module}.SCB" in self._tensors)
        )

    def owned(self) -> frozenset[str]:
        described = (f"{name}.weight." for name in self._states)
        more = tuple(described)
        return super().owned() | {n for n in self._tensors.infos if more and n.startswith(more)}
