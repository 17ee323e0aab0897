"""Linear layers of a decoder on registry kernels, and the buffers that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexq_bench.decode.experts import GroupedMix, Mix, PackedExperts
from flexq_bench.kernels.contract import Config, LinearKernel, PackedOperand
from flexq_bench.kernels.decoder import Destination, Norm, WeightedRows

# The configuration for m tokens of a layer; None: the kernel's own heuristic.
ChooseConfig = Callable[[LinearKernel, int, int, int], Config | None]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer. weights: in the kernel's layout. bias: FP16 [N] or None."""

    name: str
    kernel: LinearKernel
    weights: PackedOperand
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.weights.nbytes + bias


class Workspace:
    """Activation and output buffers for m tokens, shared by layers of the same shape."""

    def __init__(self, m: int, device: torch.device, choose: ChooseConfig) -> None:
        self.m = m
        self._device, self._choose = device, choose
        self._packed: dict[tuple[str, int], PackedOperand] = {}
        self._outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._configs: dict[tuple[str, int, int], Config | None] = {}
        self._mix: Mix | None = None
        self._mixed: torch.Tensor | None = None

    def destination(self, linear: PackedLinear) -> Destination:
        """Return the packed activation buffer of a layer, with its kernel and configuration."""
        kernel, k = linear.kernel, linear.weights.k
        key = (kernel.spec.label, k)
        if key not in self._packed:
            self._packed[key] = kernel.empty_activation(self.m, k, self._device)
        packed = kernel.for_weights(self._packed[key], linear.weights)
        return Destination(kernel, packed, self._config(linear))

    def multiply(self, linear: PackedLinear) -> torch.Tensor:
        """Multiply the layer's packed activations: FP16 [m, N], valid until its next call."""
        to, out = self.destination(linear), self.output(linear)
        kernel, bias = linear.kernel, linear.bias
        made = kernel.gemm(to.packed, linear.weights, out, bias=bias, config=to.config)
        return out if made is None else made

    def apply(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for FP16 activations [m, K]."""
        to, out = self.destination(linear), self.output(linear)
        kernel, bias = linear.kernel, linear.bias
        made = kernel.linear(x, to.packed, linear.weights, out, bias=bias, config=to.config)
        return out if made is None else made

    def dense(self, kernel: LinearKernel, k: int) -> Destination:
        """Return a buffer of FP16 activations [m, K]; kernel: one that takes them."""
        key = (kernel.spec.label, k)
        if key not in self._packed:
            self._packed[key] = kernel.empty_activation(self.m, k, self._device)
        return Destination(kernel, self._packed[key], None)

    def mix(
        self, router: PackedLinear, experts: PackedExperts, *, as_rows: bool
    ) -> torch.Tensor | WeightedRows:
        """The weighted sum of experts, FP16 [m, hidden], valid until the next call.

        Their input and the router's is in the router's FP16 buffer. as_rows: what is to be summed.
        """
        self._mix = experts.mixing(self.m, self._mix)
        if self._mixed is None:
            shape = (self.m, experts.hidden)
            self._mixed = torch.zeros(shape, dtype=torch.float16, device=self._device)
        x = self.destination(router).packed.buffers["values"][: self.m, : experts.hidden]
        rows = self._mix(x, self.multiply(router), None if as_rows else self._mixed)
        return rows if as_rows and rows is not None else self._mixed

    def mix_norm(
        self,
        router: PackedLinear,
        experts: PackedExperts,
        residual: torch.Tensor,
        delta: torch.Tensor,
        norm: Norm,
    ) -> tuple[torch.Tensor, WeightedRows] | None:
        """The sum residual + delta FP16 [m, hidden], and what experts of its norm are to sum.

        Both are valid until the next call. None: no kernel computes norm and router at once.
        """
        mix = self._mix = experts.mixing(self.m, self._mix)
        if not isinstance(mix, GroupedMix):
            return None
        return mix.of_norm(residual, delta, norm, router.weights.buffers["values"])

    def output(self, linear: PackedLinear) -> torch.Tensor:
        """The buffer of a layer's last output, FP16 [m, N]."""
        key = (linear.name, linear.weights.rows)
        if key not in self._outputs:
            shape = (self.m, linear.weights.rows)
            self._outputs[key] = torch.zeros(shape, dtype=torch.float16, device=self._device)
        return self._outputs[key]

    def _config(self, linear: PackedLinear) -> Config | None:
        key = (linear.kernel.spec.label, linear.weights.rows, linear.weights.k)
        if key not in self._configs:
            self._configs[key] = self._choose(linear.kernel, self.m, *key[1:])
        return self._configs[key]


class Workspaces(dict[int, Workspace]):
    """Workspaces of a device by their number of tokens, created on first use."""

    def __init__(self, device: torch.device, choose: ChooseConfig) -> None:
        self._device, self._choose = device, choose

    def __missing__(self, m: int) -> Workspace:
        self[m] = Workspace(m, self._device, self._choose)
        return self[m]
