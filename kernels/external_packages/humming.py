"""Humming: the successor of vLLM's Marlin kernels, a package that compiles at run time.

It supports low-bit integer and float weights with activations of 16 and 8 bits. `humming-w4a16` has
Marlin's format (symmetric 4-bit codes, an FP16 scale per 128 of k), `humming-fp6` has E3M2 weights
with a scale per row, as FP6-LLM. With int8 activations it rounds scales of groups to integers of 11
bits. The package chooses its own configuration for a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.external.declare import kernel, linear_kernel
from flexq_bench.kernels.external_packages.packages import HUMMING, load
from flexq_bench.kernels.formats import NumberFormat

_N_MULTIPLE, _K_MULTIPLE = 64, 128
_FP16_BITS, _SCALE_BITS = 11, 9  # rounds to FP16; with integer scales of groups
_TOP = 7  # of symmetric 4-bit codes: without -8 they are sign and magnitude
_E0M3 = "float4e0m3"  # a sign and a magnitude
_INT8, _FP8 = "int8/row@fp32", "fp8/row@fp32"
_ACTIVATIONS = {"fp16": "float16", _INT8: "int8", _FP8: "float8e4m3"}


def _packing(weight: str, activation: str) -> Callable[..., tuple[Any, ...]]:
    """Return the packing of weights [N,K] or [experts,N,K] and their scales."""
    fmt = NumberFormat.parse(weight)

    def packed(
        values: torch.Tensor, scales: torch.Tensor, *, n: int, k: int, experts: int = 0
    ) -> tuple[Any, ...]:
        if n % _N_MULTIPLE or k % _K_MULTIPLE:  # the package would pad them
            raise UnsupportedError(
                f"Humming takes N in multiples of {_N_MULTIPLE} and K of {_K_MULTIPLE}, got {n}x{k}"
            )
        codes, dtype = _codes(fmt, values, is_signed=activation == "fp16")
        layer = load(HUMMING, "layer").HummingLayer(
            shape_n=n,
            shape_k=k,
            num_experts=experts or None,
            weight_config={"dtype": dtype, "group_size": fmt.group or 0},
            input_config={"dtype": _ACTIVATIONS[activation]},
            torch_dtype=torch.float16,
        )
        layer = layer.to(values.device)
        weights = load(HUMMING, "ops").pack_weight(codes, fmt.bits)
        layer.load_from_tensors({"weight": weights, "weight_scale": scales.half()})
        layer.transform()
        second = getattr(layer, "weight_scale_2", None)
        of_rows = () if second is None else (second.data,)
        return (
            layer.humming_config,
            layer.locks,
            layer.weight.data,
            layer.weight_scale.data,
            *of_rows,
        )

    return packed


def _codes(fmt: NumberFormat, values: torch.Tensor, *, is_signed: bool) -> tuple[torch.Tensor, str]:
    """Return codes int32 in the package's encoding, and its name.

    is_signed: of 4-bit integers: sign and magnitude, else with half of the range added.
    """
    if fmt.kind == "float":
        codes = fmt.float_type.codes(values).to(torch.int32).contiguous()
        return codes, f"float{fmt.bits}{fmt.element}"
    wide = values.to(torch.int32)
    if not is_signed:
        return (wide + 2 ** (fmt.bits - 1)).contiguous(), f"int{fmt.bits}"
    if int(values.min()) < -_TOP:
        raise ShapeError(f"codes lie within ±{_TOP} here, got {int(values.min())}")
    return wide.abs() | (wide < 0).to(torch.int32) << 3, _E0M3


def _forward(
    x: torch.Tensor,
    layout: Any,
    locks: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    load(HUMMING, "forward").humming_forward(
        layout, inputs=x, outputs=out, weight=weight, weight_scale=scales, locks=locks
    )


def _forward_codes(
    x: torch.Tensor, x_scales: torch.Tensor, layout: Any, locks: torch.Tensor, *tensors: Any
) -> None:
    *weight, out = tensors
    multiply_codes(x, x_scales, layout, locks, weight, out)


def multiply_codes(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    layout: Any,
    locks: torch.Tensor,
    operand: Sequence[torch.Tensor],
    out: torch.Tensor,
    **of_experts: Any,
) -> None:
    """Multiply codes by an operand: weights, scales and, if there are such, scales of rows."""
    weight, scales, *second = operand
    load(HUMMING, "forward").humming_forward(
        layout,
        inputs=x,
        input_scale=x_scales,
        outputs=out,
        weight=weight,
        weight_scale=scales,
        weight_scale_2=second[0] if second else None,
        locks=locks,
        **of_experts,
    )


def _declared(name: str, weight: str, description: str, activation: str = "fp16") -> Any:
    has_codes = activation != "fp16"
    return linear_kernel(
        name,
        weight=weight,
        activation=activation,
        backends=["cuda"],
        prepare_weight=_packing(weight, activation),
        rounds_to=_SCALE_BITS if activation == _INT8 else _FP16_BITS,
        summary=f"{description} of humming-kernels, which follow Marlin",
        package=HUMMING,
    )(_forward_codes if has_codes else _forward)


def _experts(name: str, weight: str) -> Any:
    @kernel(
        "grouped_linear",
        name,
        weight=weight,
        activation=_INT8,
        backends=["cuda"],
        prepare_weight=_packing(weight, _INT8),
        rounds_to=_SCALE_BITS,
        package=HUMMING,
        min_capability=(9, 0),
        summary=f"{weight} experts of humming-kernels",
    )
    def grouped(
        x: torch.Tensor,
        x_scales: torch.Tensor,
        layout_of_weights: Any,
        locks: torch.Tensor,
        *tensors: Any,
        layout: str,
    ) -> None:
        *operand, sizes, y = tensors
        ends = sizes if layout == "masked" else torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        multiply_codes(
            *(x, x_scales, layout_of_weights, locks, operand, y),
            expert_layout=ends,
            compute_config={"gemm_type": f"grouped_{layout}"},
        )

    return grouped


KERNELS = (
    _declared("humming-w4a16", "int4/128", "symmetric 4-bit weights"),
    _declared("humming-fp6", "fp6/row", "E3M2 weights"),
    _declared("humming-w6a8", "int6/128", "symmetric 6-bit weights", _INT8),
    _declared("humming-w6a8-row", "int6/row", "symmetric 6-bit weights", _INT8),
    _declared("humming-w4a8", "int4/128", "symmetric 4-bit weights", _INT8),
    _declared("humming-fp6a8", "fp6-e2m3/row", "E2M3 weights", _FP8),
    _experts("humming-experts-w6a8", "int6/128"),
    _experts("humming-experts-w6a8-row", "int6/row"),
    _experts("humming-experts-w4a8", "int4/128"),
)
