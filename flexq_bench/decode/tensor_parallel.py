"""Tensor-parallel decode: the share of one rank in every layer (Megatron-LM, arXiv 1909.08053).

qkv_proj and gate_up_proj are split by rows, between heads and neurons; o_proj and down_proj by
columns, whose partial sums are added over the ranks; the output head by rows, if they divide. A
rank has the cache of its own heads. Codes and scales are those of the whole layer. Partial sums are
rounded to FP16 before they are added. An activation scale of a whole row must be that of all ranks'
columns: a rank's share gets ROW_ENDS columns more, whose weights are 0, and whose activations are
the largest and the smallest of the whole row. Otherwise all computes as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from flexq_bench.decode.architecture import LAYERS, DecoderArchitecture
from flexq_bench.decode.weights import BlockWeights, Ends, WeightSource, layer_shape, parts_of
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.schemes.activations import ActivationQuantizer, StaticActivation
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer

ROW_ENDS = 128  # of a multiple of which kernels take K
_HEAD_ROWS = 16  # of a rank's output head a multiple, as kernels require


def share_of(architecture: DecoderArchitecture, count: int) -> DecoderArchitecture:
    """The architecture of one of so many ranks. Raises UsageError if it can't be split."""
    model = architecture.dimensions
    if model.experts is not None:
        raise UsageError(f"{model.name} has experts, which GPUs can't share: leave --gpus out")
    sizes = {"heads": model.heads, "KV heads": model.kv_heads, "neurons": model.ffn}
    for name, size in sizes.items():
        if size % count:
            raise UsageError(f"{model.name} has {size} {name}, which {count} GPUs can't share")
    share = replace(
        model,
        heads=model.heads // count,
        kv_heads=model.kv_heads // count,
        ffn=model.ffn // count,
    )
    return replace(architecture, dimensions=share)


class RankWeights(WeightSource):
    """The share of a rank. Blocks are read whole, one at a time.

    Raises UsageError if heads, KV heads or neurons can't be divided among the ranks.
    """

    def __init__(self, source: WeightSource, ranks: Ranks) -> None:
        self._source, self._rank, self._count = source, ranks.rank, ranks.count
        self.architecture = share_of(source.architecture, ranks.count)
        self.is_synthetic, self.scheme_version = source.is_synthetic, source.scheme_version
        self.content_hashes: Mapping[int, str] = source.content_hashes

    @property
    def whole(self) -> DecoderArchitecture:
        return self._source.architecture

    def formats(self) -> dict[str, LayerFormats]:
        return self._source.formats()

    def fp8_scales(self, index: int) -> torch.Tensor | None:
        scales = self._source.fp8_scales(index)
        return None if scales is None else scales.chunk(self._count, dim=1)[self._rank].contiguous()

    def ends(self, device: torch.device) -> Ends:
        ends = self._source.ends(device)
        rows = len(ends.head)
        if rows % (_HEAD_ROWS * self._count):
            return ends
        return replace(ends, head=ends.head.chunk(self._count)[self._rank].clone())

    def block(self, index: int, device: torch.device) -> BlockWeights:
        block = self._source.block(index, device)
        first, out, second, down = LAYERS[self.architecture.block]
        shares = {}
        for name in (first, out, second, down):
            layer = block.linears.pop(name)
            try:
                shares[name] = (
                    self._columns(layer) if name in (out, down) else self._rows(name, layer)
                )
            except ShapeError as error:
                raise UsageError(
                    f"{name} of {self.whole.dimensions.name} can't be shared by {self._count} "
                    f"GPUs: {error}"
                ) from error
        return replace(block, linears=shares)

    def _rows(self, name: str, layer: QuantizedLayer) -> QuantizedLayer:
        spans = list(self._spans(name))
        for start, stop in spans:
            block_rows = layer.weight.block_rows
            if block_rows is not None and (start % block_rows or stop % block_rows):
                raise ShapeError(f"rows {start} to {stop} cut a block of {block_rows}")
        weight = Operand.stacked([layer.weight.slice_rows(*span) for span in spans])
        bias = layer.bias
        if bias is not None:
            bias = torch.cat([bias[start:stop] for start, stop in spans])
        return replace(layer, weight=replace(weight, block_rows=layer.weight.block_rows), bias=bias)

    def _spans(self, name: str) -> Iterator[tuple[int, int]]:
        """Rows of a fused layer that are this rank's: of each of its parts."""
        begin = 0
        for kind in parts_of(name):
            rows = layer_shape(self.whole, kind)[0]
            share = rows // self._count
            yield begin + self._rank * share, begin + (self._rank + 1) * share
            begin += rows

    def _columns(self, layer: QuantizedLayer) -> QuantizedLayer:
        share = layer.weight.k // self._count
        weight = layer.weight.slice_columns(self._rank * share, (self._rank + 1) * share)
        if layer.activation is not None and has_row_scale(layer.activation):
            weight = weight.with_zero_columns(ROW_ENDS)
        return replace(layer, weight=weight, bias=None if self._rank else layer.bias)


def has_row_scale(activation: ActivationQuantizer) -> bool:
    """Return True if all activations of a token share a scale that is computed from them."""
    number = activation.format
    is_dynamic = not isinstance(activation, StaticActivation)
    return is_dynamic and number.group is None and number.block_rows == 1


def with_row_ends(x: torch.Tensor, columns: int, ranks: Ranks) -> torch.Tensor:
    """Append the largest and smallest values of the rows of all ranks to x [m, K], and zeros.

    columns: of the result, at least K + 2.
    """
    ends = torch.stack([x.amax(dim=1), -x.amin(dim=1)], dim=1)
    largest, smallest = ranks.largest(ends).unbind(dim=1)
    wide = x.new_zeros(len(x), columns)
    k = x.shape[1]
    wide[:, :k], wide[:, k], wide[:, k + 1] = x, largest, -smallest
    return wide
