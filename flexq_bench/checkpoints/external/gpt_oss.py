"""GPT-OSS's folders (`quant_method` mxfp4): experts of all blocks in MXFP4, several in one tensor.

    mlp.experts.gate_up_proj_blocks  uint8 [experts, 2 · inner, K / 32, 16]: codes of 4 bits, the
                                     first in the low half of a byte
    mlp.experts.gate_up_proj_scales  uint8 [experts, 2 · inner, K / 32]: exponents plus 127
    mlp.experts.gate_up_proj_bias    BF16 [experts, 2 · inner]
    mlp.experts.down_proj_blocks, …  the same, [experts, K, inner / 32, 16]

Rows of gate_up_proj alternate: gate, up, gate, … (openai/gpt-oss; transformers'
integrations/mxfp4).
Each expert becomes three layers, `mlp.experts.3.gate_proj` and so on.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.floats import float_operand, power_scales, unpack_bytes
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.kernels.formats import NumberFormat, Operand

_BLOCKS = "_blocks"
_PARTS = (_BLOCKS, "_scales", "_bias")
_MXFP4 = NumberFormat.parse("mxfp4")
_BLOCK_BYTES = 16  # of 32 codes
# Layers by the tensor that has them: the first of their rows, and the distance to the next.
_ROWS = {
    "gate_up_proj": {"gate_proj": (0, 2), "up_proj": (1, 2)},
    "down_proj": {"down_proj": (0, 1)},
}


class GptOssLayers(LayerReader):
    """Experts of a folder of quant_method `mxfp4`, separately."""

    method = "mxfp4"
    parts = tuple(f"{packed}{part}" for packed in _ROWS for part in _PARTS)

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        super().__init__(tensors, section)
        self._places: dict[str, tuple[str, int, slice]] = {}
        for experts in self.names:
            for packed, layers in _ROWS.items():
                full = f"{experts}.{packed}"
                shape = tensors.shape(f"{full}{_BLOCKS}")
                if len(shape) != 4 or shape[-1] != _BLOCK_BYTES:
                    raise CheckpointError(
                        f"{full}{_BLOCKS} is {list(shape)}, expected [experts, rows, blocks, 16]"
                    )
                for layer, (first, step) in layers.items():
                    for index in range(shape[0]):
                        rows = slice(first, None, step)
                        self._places[f"{experts}.{index}.{layer}"] = (full, index, rows)
        self._packed = self.names
        self.names = tuple(sorted(self._places))

    def shape(self, name: str) -> tuple[int, int]:
        full, _, rows = self._places[name]
        _, n, blocks, _ = self._tensors.shape(f"{full}{_BLOCKS}")
        return len(range(n)[rows]), blocks * 2 * _BLOCK_BYTES

    def formats(self, name: str) -> str:
        return _MXFP4.name

    def has_bias(self, name: str) -> bool:
        return f"{self._places[name][0]}_bias" in self._tensors

    def owned(self) -> frozenset[str]:
        named = (f"{experts}.{part}" for experts in self._packed for part in self.parts)
        return frozenset(name for name in named if name in self._tensors)

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        full, index, rows = self._places[name]
        shape = self._tensors.shape(f"{full}{_BLOCKS}")
        blocks = self._tensors.take(f"{full}{_BLOCKS}", (torch.uint8,))[index, rows]
        scale = f"{full}_scales"
        scales = self._tensors.take(scale, (torch.uint8,), shape[:-1])[index, rows].contiguous()
        codes = unpack_bytes(blocks.flatten(1).contiguous().to(device), _MXFP4.bits)
        return float_operand(codes, power_scales(scales.to(device), scale), _MXFP4)

    def _biases(self, name: str) -> torch.Tensor:
        full, index, rows = self._places[name]
        return self._tensors.take(f"{full}_bias", REALS)[index, rows].contiguous()
