"""Linear layers of an evaluated model that are computed by the registry's kernels.

The counterpart of FakeQuantizedLinear. The codes of the same QuantizedLayer are packed in a
kernel's layout, and multiplied by the kernel that decodes with it: CUDA on a GPU, the CPU
implementation on a CPU.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from flexq_bench.decode.text_decoder import MAX_LAUNCH_TOKENS
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend, LinearKernel, PackedOperand
from flexq_bench.kernels.errors import KernelError
from flexq_bench.schemes.errors import NoKernelError, QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear, past_fp16
from flexq_bench.schemes.kernel_choice import kernel_label, no_kernel_reason
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.quantized_layer import QuantizedLayer

_NOT_FINITE = "cannot quantize NaN or infinity: find out where the input got them"


class ActivationBuffers:
    """Buffers of packed activations, which the layers of one model use in turn.

    Layers with the same kernel and K share them. Of buffers for launches with fewer tokens than the
    longest, only the last one is kept, so that texts of many lengths don't use more and more
    memory.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[str, int, bool], PackedOperand] = {}

    def of(self, kernel: LinearKernel, m: int, k: int, device: torch.device) -> PackedOperand:
        """Return the buffers for m tokens of K input features."""
        key = kernel.spec.label, k, m == MAX_LAUNCH_TOKENS[kernel.spec.backend]
        packed = self._packed.get(key)
        if packed is None or packed.rows != m:
            packed = self._packed[key] = kernel.empty_activation(m, k, device)
        return packed


class DenseWeightError(QuantizeError, AttributeError):
    """The weights of a quantized layer are used outside of it."""


class KernelLinear(nn.Module):
    """Y = q(R X) · W^T + bias by a kernel: FP16 in, activations rounded by the kernel, FP16 out.

    If a layer has a rotation R, torch computes it before. Codes and scales are packed on first use,
    on the device of the layer, and are not rounded again. The weights are not parameters: the
    module stays on that device.

    buffers: of the model; None: the layer has its own. kernel: one that supports the layer's
    formats; None: the one that decodes it. Raises QuantizeError with the layer's name if no kernel
    supports its formats or can run here.
    """

    def __init__(
        self,
        name: str,
        layer: QuantizedLayer,
        buffers: ActivationBuffers | None = None,
        *,
        kernel: LinearKernel | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.layer = layer
        self.out_features, self.in_features = layer.weight.rows, layer.weight.k
        self._activations = buffers or ActivationBuffers()
        self.kernel = kernel or kernel_of(name, layer)
        self._bias = None if layer.bias is None else layer.bias.to(torch.float16)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # RWKV rescales it, T5 reads its type
            raise DenseWeightError(
                f"{self.name} has no dense weights, which the model's code uses: evaluate "
                "--through reference"
            )
        return super().__getattr__(name)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., K] to [..., N] in x's dtype. Raises QuantizeError if x exceeds FP16."""
        rows = x.reshape(-1, self.in_features)
        halves = self.layer.rotated(rows).to(torch.float16).contiguous()
        if not bool(torch.isfinite(halves).all()):
            raise QuantizeError(f"{self.name}: {past_fp16(x) or _NOT_FINITE}")
        # Filled with NaN, so that an element that a kernel does not write makes the perplexity NaN.
        y = halves.new_full((len(halves), self.out_features), torch.nan)
        size = MAX_LAUNCH_TOKENS[self.kernel.spec.backend]
        try:
            weight = self._packed
            for piece, out in zip(torch.split(halves, size), torch.split(y, size), strict=True):
                if not len(piece):  # an expert without tokens
                    continue
                packed = self._activations.of(self.kernel, len(piece), self.in_features, x.device)
                made = self.kernel.linear(piece, packed, weight, out, bias=self._bias)
                if made is not None:
                    out.copy_(made)
        except KernelError as error:
            raise NoKernelError(f"{self.name}: {self.kernel.spec.label}: {error}") from error
        except ValueError as error:
            raise QuantizeError(f"{self.name}: {self.kernel.spec.label}: {error}") from error
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @cached_property
    def _packed(self) -> PackedOperand:
        return self.layer.packed_for(self.kernel)


def through_kernels(model: nn.Module) -> None:
    """Replace each FakeQuantizedLinear of the model by a KernelLinear of the same codes.

    Raises QuantizeError as KernelLinear.
    """
    buffers = ActivationBuffers()
    quantized = [
        (name, module.layer)
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    ]
    for name, layer in quantized:
        replace_module(model, name, KernelLinear(name, layer, buffers))


def kernel_of(name: str, layer: QuantizedLayer) -> LinearKernel:
    """Return the kernel that decodes a layer.

    Raises NoKernelError with the layer's name if no kernel supports its formats or can run here.
    """
    formats = layer.weight_format, layer.activation_format
    label = kernel_label(*formats)
    if label is None:
        raise NoKernelError(f"{name}: {no_kernel_reason(*formats)}: evaluate --through reference")
    backend: Backend = "cuda" if layer.weight.values.device.type == "cuda" else "cpu"
    try:
        kernel = registry.resolve(label, backend)
    except KernelError as error:
        raise NoKernelError(f"{name}: {error}") from error
    assert isinstance(kernel, LinearKernel)  # a label of a linear layer
    return kernel
