"""GPTQ's folders as AutoGPTQ and GPTQModel write them: 2, 3, 4 and 8 bits, with activation order.

The layout is that of AutoGPTQ 0.7 (auto_gptq/nn_modules/qlinear/qlinear_cuda.py) and GPTQModel
(gptqmodel/nn_modules/qlinear/__init__.py), int32 words, codes without gaps, the lowest bits first:

    qweight  int32 [K · bits / 32, N]       codes of neighbouring channels in a word
    qzeros   int32 [groups, N · bits / 32]  codes that mean 0; `gptq` (v1): minus one
    scales   FP16 [groups, N]
    g_idx    int32 [K]                      the group of each channel; without it: in sequence

W[n, k] = scale · (code - zero). Version 1 subtracts one from zero points before packing. A zero of
0 wraps, and writers differ in its effect on its neighbours in the word (GPTQModel subtracts from
whole words, AutoGPTQ from codes), so such a file is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.checkpoints.errors import HEAD, CheckpointError
from flexq_bench.checkpoints.external.integers import (
    channel_order,
    exact_scales,
    integer_operand,
)
from flexq_bench.checkpoints.external.layer_reader import LayerReader, excludes, matches
from flexq_bench.checkpoints.folder_tensors import HALVES, INTEGERS, FolderTensors
from flexq_bench.checkpoints.packing import unpack_codes, words_of
from flexq_bench.checkpoints.stored import BLOCK
from flexq_bench.kernels.formats import NumberFormat, Operand

_WORD_BITS = 32
_BITS = (2, 3, 4, 8)
_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # subtracted from zero points, by checkpoint_format
_UNSUPPORTED = ("rotation", "adapter", "lora")  # operations of GPTQModel in addition to the codes


class GptqLayers(LayerReader):
    """Layers of a folder whose `quantization_config` is AutoGPTQ's or GPTQModel's.

    Raises CheckpointError for layouts other than gptq and gptq_v2.
    """

    method = "gptq"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, tensors: FolderTensors, section: dict[str, Any]) -> None:
        layout = str(section.get("checkpoint_format") or section.get("format") or "gptq").lower()
        if section.get("is_marlin_format"):  # AutoGPTQ 0.6 and 0.7
            layout = "marlin"
        if layout not in _OFFSETS:
            raise CheckpointError(
                f"{tensors.folder.name} is a GPTQ checkpoint in the layout {layout}: save it as "
                f"{' or '.join(_OFFSETS)}"
            )
        extra = next((key for key in _UNSUPPORTED if section.get(key)), None)
        if extra is not None:
            raise CheckpointError(
                f"{tensors.folder.name} is a GPTQ checkpoint with {extra}, which is not computed "
                "here: quantize the model without"
            )
        if section.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(
                f"{tensors.folder.name} packs codes into {section['pack_dtype']}, expected int32"
            )
        dynamic = section.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(isinstance(c, dict) for c in dynamic.values()):
            raise CheckpointError("config.json has `dynamic` settings that name no layers")
        self._offset, self._dynamic = _OFFSETS[layout], dynamic
        super().__init__(tensors, section)

    def shape(self, name: str) -> tuple[int, int]:
        bits, _ = self._settings(name)
        words, rows = self._matrix(f"{name}.qweight")
        return rows, words * _WORD_BITS // bits

    def formats(self, name: str) -> str:
        bits, group = self._settings(name)
        symmetric = self._changed(name).get("sym", True)
        return NumberFormat(bits, group, "symmetric" if symmetric else "asymmetric").name

    def _operand(self, name: str, device: torch.device | str) -> Operand:
        bits, group = self._settings(name)
        rows, k = self.shape(name)
        groups = 1 if group is None else -(-k // group)
        take = self._tensors.take
        words = take(f"{name}.qweight", (torch.int32,), device=device)
        scales = take(f"{name}.scales", HALVES, (groups, rows), device=device)
        codes = unpack_codes(words.T.contiguous(), bits, k)
        order = None
        if group is not None and (self._is_ordered(name) or f"{name}.g_idx" in self._tensors):
            of_channel = take(f"{name}.g_idx", INTEGERS, (k,), device=device)
            order = channel_order(of_channel, group, name)
            if order is not None and self._changed(name).get("desc_act") is False:
                raise CheckpointError(
                    f"{name}.g_idx has an activation order, and config.json's desc_act says that "
                    "there is none, by which engines ignore it: copy the folder again"
                )
        return integer_operand(
            codes if order is None else codes[:, order.long()],
            self._zeros(name, bits, groups, rows, device),
            exact_scales(scales, f"{name}.scales").T.contiguous(),
            bits,
            group,
            order,
        )

    def _zeros(
        self, name: str, bits: int, groups: int, rows: int, device: torch.device | str
    ) -> torch.Tensor:
        shape = (groups, words_of(rows, bits))
        words = self._tensors.take(f"{name}.qzeros", (torch.int32,), shape, device=device)
        stored = unpack_codes(words, bits, rows)
        if self._offset and bool((stored == (1 << bits) - 1).any()):
            raise CheckpointError(
                f"{name}.qzeros has zero points of 0, which version 1 of GPTQ's layout can't keep "
                "apart from their neighbours: save it as gptq_v2"
            )
        zeros = stored + self._offset
        middle = 1 << (bits - 1)
        if self._changed(name).get("sym") is True and not bool((zeros == middle).all()):
            raise CheckpointError(
                f"{name}.qzeros has other zero points than {middle}, which config.json's sym says "
                "that all are: is its checkpoint_format (gptq or gptq_v2) the one that it has?"
            )
        return zeros.T.contiguous()

    def _settings(self, name: str) -> tuple[int, int | None]:
        """Bits and group of a layer."""
        settings = self._changed(name)
        bits, group = settings.get("bits"), settings.get("group_size")
        if not isinstance(bits, int) or bits not in _BITS:
            known = ", ".join(str(bits) for bits in _BITS)
            raise CheckpointError(f"{name} has GPTQ codes of {bits!r} bits; {known} are read here")
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise CheckpointError(f"{name} has GPTQ groups of {group!r} values")
        return bits, None if group == -1 else group

    def _changed(self, name: str) -> dict[str, Any]:
        """The settings of a layer: the model's, or those of `dynamic` (GPTQModel)."""
        rule = self._rule(name)
        return self._section | (self._dynamic[rule] if rule else {})

    def _rule(self, name: str) -> str:
        """The first key of `dynamic` that applies to a layer; empty: none."""
        for pattern in self._dynamic:
            if matches(name, pattern.removeprefix("+:").removeprefix("-:")):
                return str(pattern)
        return ""

    def excluded_by(self, name: str, *, loosely: bool = False) -> str:
        rule, inside = self._rule(name), self._section.get("modules_in_block_to_quantize")
        if rule.startswith("-:"):
            return f"dynamic {rule}"
        if name == HEAD.removesuffix(".weight") and self._section.get("lm_head") is False:
            return "lm_head"
        groups = ([group] if isinstance(group, str) else group for group in inside or ())
        named = [part for group in groups for part in group]
        if named and BLOCK.search(f".{name}") and not any(excludes(name, part) for part in named):
            return "modules_in_block_to_quantize"
        return super().excluded_by(name, loosely=loosely)

    def _is_ordered(self, name: str) -> bool:
        return bool(self._changed(name).get("desc_act"))
