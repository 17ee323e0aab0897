"""Humming: the successor of vLLM's Marlin kernels, a package that compiles at run time.

It supports low-bit integer and float weights with FP16 activations. `humming-w4a16` has Marlin's
format (symmetric 4-bit codes, an FP16 scale per 128 of k), `humming-fp6` has E3M2 weights with a
scale per row, as FP6-LLM. The package chooses its own configuration for a shape.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.external.declare import linear_kernel
from flexq_bench.kernels.external_packages.packages import HUMMING, load
from flexq_bench.kernels.formats import NumberFormat

_N_MULTIPLE, _K_MULTIPLE = 64, 128
_FP16_BITS = 11
_TOP = 7  # of symmetric 4-bit codes: without -8 they are sign and magnitude
_DTYPES = {4: "float4e0m3", 6: "float6e3m2"}  # by bits; e0m3 is a sign and a magnitude


def _packed(
    fmt: NumberFormat, values: torch.Tensor, scales: torch.Tensor, *, n: int, k: int
) -> tuple[Any, ...]:
    """Pack the weights. Raises UnsupportedError for shapes that the package would pad."""
    if n % _N_MULTIPLE or k % _K_MULTIPLE:
        raise UnsupportedError(
            f"Humming takes N in multiples of {_N_MULTIPLE} and K of {_K_MULTIPLE}, got {n}x{k}"
        )
    codes = _codes(fmt, values)
    layer = load(HUMMING, "layer").HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"dtype": _DTYPES[fmt.bits], "group_size": fmt.group or 0},
        torch_dtype=torch.float16,
    )
    layer = layer.to(values.device)
    packed = load(HUMMING, "ops").pack_weight(codes, fmt.bits)
    layer.load_from_tensors({"weight": packed, "weight_scale": scales.half()})
    layer.transform()
    return layer.weight.data, layer.weight_scale.data, layer.locks, layer.humming_config


def _codes(fmt: NumberFormat, values: torch.Tensor) -> torch.Tensor:
    """Return codes int32 [N,K] in the package's encoding."""
    if fmt.kind == "float":
        return fmt.float_type.codes(values).to(torch.int32).contiguous()
    if int(values.min()) < -_TOP:
        raise ShapeError(f"codes lie within ±{_TOP} here, got {int(values.min())}")
    wide = values.to(torch.int32)
    return wide.abs() | (wide < 0).to(torch.int32) << 3


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    locks: torch.Tensor,
    layout: Any,
    out: torch.Tensor,
) -> None:
    forward = load(HUMMING, "forward").humming_forward
    forward(layout, inputs=x, outputs=out, weight=weight, weight_scale=scales, locks=locks)


def _declared(name: str, weight: str, description: str) -> Any:
    return linear_kernel(
        name,
        weight=weight,
        backends=["cuda"],
        prepare_weight=partial(_packed, NumberFormat.parse(weight)),
        rounds_to=_FP16_BITS,
        summary=f"{description} of humming-kernels, which follow Marlin",
        package=HUMMING,
    )(_forward)


KERNELS = (
    _declared("humming-w4a16", "int4/128", "symmetric 4-bit weights"),
    _declared("humming-fp6", "fp6/row", "E3M2 weights"),
)
