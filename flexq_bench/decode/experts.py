"""Feed-forwards of routed experts in a decoder, packed for a device.

On a GPU the experts' linear layers are those of kernels/cuda/grouped, whose sizes stay on the
device, so that one captured step serves any routing. On a CPU each expert is multiplied by the
linear kernel of its formats. Layers of experts are read stacked along N, one expert after the
other: of `gate_up_proj` an expert has the rows of its gates, then those of its ups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from flexq_bench.decode.architecture import DecoderArchitecture, NotDecodedError
from flexq_bench.errors import UsageError
from flexq_bench.kernels.contract import LinearKernel, PackedOperand
from flexq_bench.kernels.cuda.grouped.layer import (
    ExpertLayer,
    ExpertWeights,
    can_route_sums,
    layer_builds,
)
from flexq_bench.kernels.cuda.grouped.packing import (
    EIGHT,
    FOUR,
    FP16,
    SIX,
    ExpertFormat,
    pack_experts,
)
from flexq_bench.kernels.decoder import Norm, WeightedRows
from flexq_bench.kernels.decoder.invariant import FixedOrderGemm
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_GROUPED: dict[str, ExpertFormat] = {
    "dual-w6a8": SIX,
    "dgq-w4a8": FOUR,
    "cublaslt-w8a8": EIGHT,
    "fp16": FP16,
}
_MIN_CAPABILITY = (9, 0)  # of the grouped kernels
# Writes the weighted sum of the experts of x FP16 [m, K], chosen by logits FP16 [m, experts];
# without an output, it returns what is to be summed.
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], WeightedRows | None]


@dataclass(frozen=True, slots=True)
class PackedExperts(ABC):
    """Experts of a block. label: of their kernel. normalizes: shares of a token sum up to 1."""

    label: str
    count: int
    top_k: int
    normalizes: bool
    hidden: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights of all experts."""

    @abstractmethod
    def mixing(self, m: int, like: Mix | None) -> Mix:
        """Return the computation of m tokens, with the buffers of `like`, if given.

        like: of another block of the same model.
        """


@dataclass(frozen=True, slots=True)
class GroupedExperts(PackedExperts):
    """Experts on a GPU."""

    gate_up: ExpertWeights
    down: ExpertWeights

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def mixing(self, m: int, like: Mix | None) -> Mix:
        if isinstance(like, GroupedMix):
            return GroupedMix(like.layer.with_weights(self.gate_up, self.down), self.normalizes)
        return GroupedMix(ExpertLayer(self.gate_up, self.down, m, self.top_k), self.normalizes)


@dataclass(frozen=True, slots=True)
class GroupedMix:
    """The computation on a GPU."""

    layer: ExpertLayer
    normalizes: bool

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None
    ) -> WeightedRows:
        return self.layer.mix(x, logits, out, normalizes=self.normalizes)

    def of_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm, router: torch.Tensor
    ) -> tuple[torch.Tensor, WeightedRows] | None:
        """Mix the experts of a norm, as ExpertLayer.mix_norm; None: of too many tokens or experts.

        router: FP16 [experts, K].
        """
        if not can_route_sums(len(residual), *router.shape):
            return None
        return self.layer.mix_norm(residual, delta, norm, router, normalizes=self.normalizes)


@dataclass(frozen=True, slots=True)
class SeparateExperts(PackedExperts):
    """Experts on a CPU, computed one after the other. gate_up, down: of each."""

    kernel: LinearKernel
    gate_up: tuple[PackedOperand, ...]
    down: tuple[PackedOperand, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.gate_up, *self.down))

    def mixing(self, m: int, like: Mix | None) -> Mix:
        return self._mix

    def _mix(self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None) -> None:
        assert out is not None  # operations of a CPU add no rows
        shares = torch.softmax(logits.float(), dim=1)
        values, chosen = torch.topk(shares, self.top_k, dim=1)
        if self.normalizes:
            values = values / values.sum(dim=1, keepdim=True)
        sums = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for expert in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == expert)
            gate, up = self._multiply(x[tokens], self.gate_up[expert]).chunk(2, dim=1)
            inner = functional.silu(gate.float()).half().float() * up.float()
            results = self._multiply(inner.half(), self.down[expert])
            sums.index_add_(0, tokens, results.float() * values[tokens, places, None])
        out.copy_(sums)

    def _multiply(self, x: torch.Tensor, w: PackedOperand) -> torch.Tensor:
        y = x.new_empty(len(x), w.rows)
        packed = self.kernel.empty_activation(len(x), w.k, x.device)
        made = self.kernel.linear(x.contiguous(), packed, w, y)
        return y if made is None else made


def check_grouped(model: str, labels: set[str]) -> None:
    """Raise NotDecodedError if there are no grouped kernels for experts on this machine's GPU.

    labels: of the linear kernels of the formats of the experts' layers.
    """
    if len(labels) > 1 or not labels <= _GROUPED.keys():
        raise NotDecodedError(
            f"the experts of {model} would be {', '.join(sorted(labels))}, and grouped kernels are "
            f"{', '.join(_GROUPED)}: pick another scheme"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        raise NotDecodedError(
            f"the experts of {model} need a GPU of compute capability 9.0: pick another model"
        )


def pack_layers(
    architecture: DecoderArchitecture,
    kernel: LinearKernel,
    gate_up: QuantizedLayer,
    down: QuantizedLayer,
) -> PackedExperts:
    """Pack the experts of a block. kernel: of their formats. gate_up, down: stacked along N.

    Raises ShapeError as the kernel's pack_weight, UsageError for FP16 if sums need a fixed order.
    """
    experts = architecture.dimensions.experts
    assert experts is not None
    shape = (experts.count, experts.active, architecture.normalizes_shares)
    hidden = architecture.dimensions.hidden
    if kernel.spec.backend == "cpu":
        parts = []
        for layer in (gate_up, down):
            rows = layer.weight.rows // experts.count
            cut = [layer.weight.slice_rows(i * rows, (i + 1) * rows) for i in range(experts.count)]
            parts.append(tuple(QuantizedLayer(w, layer.activation).packed_for(kernel) for w in cut))
        return SeparateExperts(kernel.spec.label, *shape, hidden, kernel, *parts)
    fmt = _GROUPED[kernel.spec.label]
    if isinstance(kernel, FixedOrderGemm):
        raise UsageError("experts add FP16 products in any order: drop --invariant, or quantize")
    packed = (_grouped(fmt, layer.weight, experts.count) for layer in (gate_up, down))
    return GroupedExperts(f"grouped-{kernel.spec.label}", *shape, hidden, *packed)


def _grouped(fmt: ExpertFormat, weight: Operand, count: int) -> ExpertWeights:
    def of_experts(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor.view(count, -1, tensor.shape[1])

    values = of_experts(weight.values)
    if fmt.element:
        ones = values.new_ones(count, values.shape[1])
        return ExpertWeights(fmt, pack_experts(values.view(torch.int8)), ones, weight.k)
    if fmt is EIGHT:
        scales = of_experts(weight.scales)[..., 0].half().contiguous()
        return ExpertWeights(fmt, pack_experts(values), scales, weight.k)
    int8_values(weight)  # checks that weights fit int8
    groups = [of_experts(weight.scales)]
    if fmt is FOUR:
        groups.append(of_experts(weight.zero_points))
    scales = of_experts(weight.row_scales)[..., 0].contiguous()
    return ExpertWeights(fmt, pack_experts(values, *groups), scales, weight.k)


def builds_of_experts(architecture: DecoderArchitecture, label: str, m: int) -> set[Build]:
    """Return the builds of a step of m tokens. label: of the linear kernel of the formats."""
    experts, hidden = architecture.dimensions.experts, architecture.dimensions.hidden
    assert experts is not None
    fmt = _GROUPED[label]

    def shaped(n: int, k: int) -> ExpertWeights:
        nothing = torch.empty(experts.count, n, device="meta")
        return ExpertWeights(fmt, nothing, nothing, k)

    gate_up, down = shaped(2 * experts.ffn, hidden), shaped(hidden, experts.ffn)
    return layer_builds(gate_up, down, m, experts.active)
