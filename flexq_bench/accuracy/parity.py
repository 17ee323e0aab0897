"""Parity of kernels with the reference: the output of each quantized layer, computed by both.

KernelLinear packs the layer's codes in the kernel's layout and lets the kernel round the inputs. It
shares only the codes, and the definition of a format, with FakeQuantizedLinear. The one that the
model was evaluated with is compared without being rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.accuracy.kernel_linear import KernelLinear, kernel_of
from flexq_bench.kernels.contract import Backend, LinearKernel
from flexq_bench.kernels.reference import Reference
from flexq_bench.kernels.registry import resolve
from flexq_bench.measure.check import relative_error
from flexq_bench.schemes.calibration import observing
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.model_map import map_model

TOKENS = 8  # number of each layer's inputs: the first ones, which contain outliers


@dataclass(frozen=True, slots=True)
class SiteParity:
    """Comparison of one layer with a kernel.

    kernel: its label; empty: none of the given ones supports the layer's formats. max_rel_error: as
    in flexq_bench.measure.check, infinite for an output that is not finite; None: not computed, see
    `detail`.
    """

    site: str
    kernel: str
    max_rel_error: float | None
    detail: str = ""


@torch.no_grad()
def kernel_parity(
    original: nn.Module,
    quantized: nn.Module,
    segment: torch.Tensor,
    labels: Sequence[str] | None,
    *,
    backend: Backend,
) -> list[SiteParity]:
    """Compare every quantized layer with the kernel for its formats.

    segment: [T], int64: tokens from which the inputs are computed. labels: only these kernels, the
    first that supports a layer's formats; None: the one that decodes it. Raises KernelError for an
    unknown label, QuantizeError for a model without a layer map.
    """
    named = [kernel for label in labels or () if (kernel := _linear(label, backend)) is not None]
    layout = map_model(original)
    inputs: dict[str, torch.Tensor] = {}

    def keep(site: Any, rows: torch.Tensor) -> None:
        inputs[site.name] = rows[:TOKENS].to(torch.float16)

    device = next(original.parameters()).device
    with observing(quantized, layout.sites, keep):
        # The class's own forward pass calls the modules. The instance may have decode's instead.
        type(quantized).forward(quantized, input_ids=segment.to(device)[None], use_cache=False)
    parities = []
    for site in layout.sites:
        module = quantized.get_submodule(site.name)
        if not isinstance(module, FakeQuantizedLinear | KernelLinear):
            parities.append(SiteParity(site.name, "", None, "it is not quantized"))
            continue
        kernel = next((k for k in named if _takes(k, module)), None)
        reason = "no kernel named has its formats" if kernel is None else ""
        if labels is None:
            try:
                kernel = kernel_of(site.name, module.layer)
            except QuantizeError as error:
                reason = str(error).removeprefix(f"{site.name}: ")
        if kernel is None:
            parities.append(SiteParity(site.name, "", None, reason))
            continue
        if site.name not in inputs:  # an expert without tokens: use inputs of another one
            inputs[site.name] = next(
                inputs[other.name]
                for other in layout.of_block(site.block)
                if other.of_expert and other.role == site.role and other.name in inputs
            )
        parities.append(_compare(kernel, module, inputs[site.name]))
    return parities


def _compare(
    kernel: LinearKernel, module: FakeQuantizedLinear | KernelLinear, x: torch.Tensor
) -> SiteParity:
    name, label = module.name, kernel.spec.label
    same = isinstance(module, KernelLinear) and module.kernel is kernel
    try:
        computing = module if same else KernelLinear(name, module.layer, kernel=kernel)
        y = computing(x)
    except QuantizeError as error:
        return SiteParity(name, label, None, str(error))
    if not isinstance(module, FakeQuantizedLinear):
        module = FakeQuantizedLinear(name, module.layer)
    reference = _reference(module, x)
    errors = relative_error(y, reference)
    worst = float(torch.nan_to_num(errors, nan=math.inf, posinf=math.inf).max())
    return SiteParity(name, label, worst)


def _reference(layer: FakeQuantizedLinear, x: torch.Tensor) -> Reference:
    """The layer's output with its products summed in float64, and the sum of their magnitudes."""
    rows = layer.layer.rotated(x.float())
    rows = rows if layer.order is None else rows[:, layer.order]
    rows = rows if layer.activation is None else layer.activation(rows)
    rows, weight = rows.double(), layer.weight.double()
    y, magnitude = rows @ weight.T, rows.abs() @ weight.abs().T
    if layer.bias is not None:
        bias = layer.bias.double()
        y, magnitude = y + bias, magnitude + bias.abs()
    return Reference(y, magnitude)


def _takes(kernel: LinearKernel, module: FakeQuantizedLinear | KernelLinear) -> bool:
    formats = module.layer.weight_format, module.layer.activation_format
    return formats == (kernel.spec.weight, kernel.spec.activation)


def _linear(label: str, backend: Backend) -> LinearKernel | None:
    kernel = resolve(label, backend)
    return kernel if isinstance(kernel, LinearKernel) else None
