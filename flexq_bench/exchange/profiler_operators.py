"""Operators in traces of torch's profiler, as workloads: their input shapes are data of the trace.

Names and orders of arguments are those of the operators' schemas in torch (aten), vLLM (_C),
SGLang (sgl_kernel) and FlashAttention (flash_attn).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload, operation

Workload = GemmWorkload | OperationWorkload
Shapes = Sequence[tuple[int, ...] | None]  # of inputs; None: no tensor
Rule = Callable[[Shapes, Sequence[str]], Workload]

_MATRIX = 2
_CUBE = 3


class NoWorkloadError(Exception):
    """An operator is known, and no workload stands for this call. The text says why."""


def workload_of_call(name: str, arguments: Mapping[str, Any]) -> Workload | None:
    """Return the workload of a call; None: it computes nothing.

    arguments: the event's `args`, with "Input Dims" and "Concrete Inputs" of `record_shapes=True`.
    Raises KeyError if the operator is not known, NoWorkloadError.
    """
    rule = OPERATORS[name]
    if "Input Dims" not in arguments:
        raise NoWorkloadError("the trace has no shapes: profile with record_shapes=True")
    dims, values = arguments["Input Dims"], arguments.get("Concrete Inputs", ())
    shapes = [_shape(value) for value in dims] if isinstance(dims, list) else []
    if any(0 in shape for shape in shapes if shape):
        return None
    texts = [str(value)[:40] for value in values] if isinstance(values, list) else []
    try:
        return rule(shapes, texts)
    except WorkloadError as error:  # a ValueError, too
        raise NoWorkloadError(str(error)) from None
    except (IndexError, TypeError, ValueError):
        raise NoWorkloadError("its shapes are not those of the operator") from None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for lists of tensors and anything else."""
    if isinstance(value, list) and value and all(type(size) is int for size in value):
        return tuple(value)
    return None


def _product(x: int = 0, w: int = 1) -> Rule:
    """A matrix product of inputs [M, K] and [K, N]. x, w: their positions."""

    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        (m, k), (k_too, n) = _tensor(shapes, x), _tensor(shapes, w)
        _check_equal(k, k_too)
        return GemmWorkload(m, n, k)

    return rule


def _linear(x: int = 0, w: int = 1) -> Rule:
    """A linear layer of inputs [..., K] and [N, K]."""

    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        *rows, k = _tensor(shapes, x)
        *outputs, k_too = _tensor(shapes, w)
        _check_equal(k, k_too)
        return GemmWorkload(prod(rows), prod(outputs), k)

    return rule


def _output_and_input(y: int = 0, x: int = 1) -> Rule:
    """A linear layer with packed weights, of output [M, N] and input [M, K]."""

    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        (m, n), (m_too, k) = _tensor(shapes, y), _tensor(shapes, x)
        _check_equal(m, m_too)
        return GemmWorkload(m, n, k)

    return rule


def _matmul(shapes: Shapes, _: Sequence[str]) -> Workload:
    """Of [..., K] and [K, N], else of batches."""
    x, w = _tensor(shapes, 0), _tensor(shapes, 1)
    if len(w) == _MATRIX:
        _check_equal(x[-1], w[0])
        return GemmWorkload(prod(x[:-1]), w[1], w[0])
    if len(x) >= _MATRIX and len(w) >= _CUBE:
        return _batches(prod(w[:-2]), (*x[-2:],), (*w[-2:],))
    raise NoWorkloadError("a product with a vector")


def _batched(x: int, w: int) -> Rule:
    """A batch of products of [B, M, K] and [B, K, N]."""

    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        (b, *of_x), (b_too, *of_w) = _tensor(shapes, x), _tensor(shapes, w)
        _check_equal(b, b_too)
        return _batches(b, tuple(of_x), tuple(of_w))

    return rule


def _batches(batch: int, x: tuple[int, ...], w: tuple[int, ...]) -> Workload:
    (m, k), (k_too, n) = x, w
    _check_equal(k, k_too)
    if batch == 1:
        return GemmWorkload(m, n, k)
    # Every token at every expert: m rows for each matrix, as in the batch.
    return operation("grouped_linear").workload(tokens=m, experts=batch, top_k=batch, n=n, k=k)


def _attention(causal: int | None, *, heads_first: bool = True, mask: int | None = None) -> Rule:
    """Attention of Q, K and V: [B, heads, S, D] if heads_first, else [B, S, heads, D].

    causal, mask: the positions of these arguments; None: it has none.
    """

    def rule(shapes: Shapes, values: Sequence[str]) -> Workload:
        q, k = _tensor(shapes, 0), _tensor(shapes, 1)
        if heads_first:
            (batch, heads, tokens, dim), (_, kv_heads, length, _) = q, k
        else:
            (batch, tokens, heads, dim), (_, length, kv_heads, _) = q, k
        common: dict[str, Value] = {
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "layout": "contiguous",
        }
        if tokens == 1:
            return operation("attention_decode").workload(context=length, **common)
        masked = mask is not None and mask < len(shapes) and shapes[mask] is not None
        is_causal = causal is not None and values[causal : causal + 1] in (["True"], ["1"])
        if not (masked or is_causal) or length < tokens:
            raise NoWorkloadError("attention that is not causal")
        return operation("attention_prefill").workload(
            tokens=tokens, past=length - tokens, **common
        )

    return rule


def _norm(norm: str, x: int = 0, residual: str = "none") -> Rule:
    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        *rows, hidden = _tensor(shapes, x)
        return operation("norm_quantize").workload(
            tokens=prod(rows), hidden=hidden, norm=norm, residual=residual
        )

    return rule


def _activation(function: str, y: int = 0) -> Rule:
    def rule(shapes: Shapes, _: Sequence[str]) -> Workload:
        *rows, hidden = _tensor(shapes, y)
        return operation("activation_quantize").workload(
            tokens=prod(rows), hidden=hidden, function=function
        )

    return rule


def _none(reason: str) -> Rule:
    """An operator that is counted and not measured."""

    def rule(_: Shapes, __: Sequence[str]) -> Workload:
        raise NoWorkloadError(reason)

    return rule


def _tensor(shapes: Shapes, position: int) -> tuple[int, ...]:
    shape = shapes[position]
    if shape is None:
        raise NoWorkloadError(f"input {position} has no shape")
    return shape


def _check_equal(a: int, b: int) -> None:
    if a != b:
        raise NoWorkloadError(f"its shapes do not fit: {a} and {b}")


_PAGED = "the trace has no lengths of the sequences: a trace of FlashInfer-Bench has them"

OPERATORS: Mapping[str, Rule] = {
    "aten::linear": _linear(),
    "aten::mm": _product(),
    "aten::addmm": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::matmul": _matmul,
    "aten::bmm": _batched(0, 1),
    "aten::baddbmm": _batched(1, 2),
    "aten::_int_mm": _product(),
    "aten::_scaled_mm": _product(),
    "aten::_scaled_mm_v2": _product(),
    "aten::_weight_int8pack_mm": _linear(),
    "aten::_grouped_mm": _none("rows of experts are in its data"),
    "aten::_scaled_grouped_mm": _none("rows of experts are in its data"),
    "_C::cutlass_scaled_mm": _output_and_input(),
    "_C::cutlass_scaled_mm_azp": _output_and_input(),
    "_C::cutlass_scaled_fp4_mm": _none("its inputs are packed"),
    "sgl_kernel::fp8_scaled_mm": _product(),
    "sgl_kernel::int8_scaled_mm": _product(),
    "aten::scaled_dot_product_attention": _attention(5, mask=3),
    "aten::_scaled_dot_product_flash_attention": _attention(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(4, mask=5),
    "aten::_scaled_dot_product_efficient_attention": _attention(6, mask=3),
    "aten::_scaled_dot_product_cudnn_attention": _attention(6, mask=3),
    "flash_attn::_flash_attn_forward": _attention(5, heads_first=False),
    "flash_attn::_flash_attn_varlen_forward": _none(_PAGED),
    "vllm::unified_attention": _none(_PAGED),
    "vllm::unified_attention_with_output": _none(_PAGED),
    "aten::rms_norm": _norm("rms"),
    "aten::_fused_rms_norm": _norm("rms"),
    "aten::layer_norm": _norm("layer"),
    "aten::native_layer_norm": _norm("layer"),
    "_C::rms_norm": _norm("rms", 1),
    "_C::fused_add_rms_norm": _norm("rms", residual="add"),
    "sgl_kernel::rmsnorm": _norm("rms", 1),
    "sgl_kernel::fused_add_rmsnorm": _norm("rms", residual="add"),
    "_C::silu_and_mul": _activation("silu_mul"),
    "sgl_kernel::silu_and_mul": _activation("silu_mul"),
    "aten::gelu": _activation("gelu"),
}
