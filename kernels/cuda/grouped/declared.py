"""Kernels of the operation `grouped_linear`, declared through the public interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexq_bench.kernels.cpu import grouped as on_cpu
from flexq_bench.kernels.cuda.grouped.gemm import FewConfig, ManyConfig, configs_for, grouped_gemm
from flexq_bench.kernels.cuda.grouped.packing import (
    BF16,
    EIGHT,
    FLEXQ,
    FOUR,
    FP16,
    SIX,
    ExpertFormat,
    pack_experts,
)
from flexq_bench.kernels.external.declare import kernel
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.runtime.nvrtc import compile_build
from flexq_bench.workloads.operation import OperationWorkload

_OF_CPU = (
    (SIX, on_cpu.DUAL_W6A8),
    (FOUR, on_cpu.DGQ_W4A8),
    (EIGHT, on_cpu.W8A8),
    (FLEXQ, on_cpu.FLEXQ_W6A6),
    (FLEXQ, on_cpu.FLEXQ_W6A8),
)
_TYPICAL = {"tokens": 64, "experts": 128, "top_k": 8, "n": 1408, "k": 2816}  # for static metrics


def _declared(
    fmt: ExpertFormat, of_cpu: FunctionDefinition
) -> tuple[FunctionDefinition, FunctionDefinition]:
    """Return the kernel's declarations for a CPU and for a GPU."""

    def chunks(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if fmt is FLEXQ:
            return pack_experts(*parts, half_scales=True), parts[1].new_empty(0)
        _, row_scales = on_cpu.int8_experts(*parts)  # checks that weights fit int8
        codes, *of_groups = parts[:2] + parts[3:]
        return pack_experts(codes, *(of_groups if fmt is not EIGHT else ())), row_scales

    def configurations(workload: OperationWorkload) -> Sequence[dict[str, Any]]:
        return [config.as_dict() for config in configs_for(fmt, dict(workload.values))]

    def machine_code(target: str) -> bytes | None:
        build = configs_for(fmt, _TYPICAL)[0].build(fmt, bfloat=bool(of_cpu.variant))
        return compile_build(build, target).code if build.runs_on(target) else None

    @kernel(
        "grouped_linear",
        of_cpu.name,
        weight=of_cpu.weight.name,
        activation=of_cpu.activation.name,
        dtype=of_cpu.dtype,
        variant=of_cpu.variant,
        backends=["cuda"],
        prepare_weight=chunks,
        configurations=configurations,
        min_capability=(9, 0),
        machine_code=machine_code,
        summary=f"{of_cpu.summary}, one launch over the experts that have tokens",
    )
    def grouped(
        codes: torch.Tensor,
        scales: torch.Tensor,
        w_chunks: torch.Tensor,
        row_scales: torch.Tensor,
        sizes: torch.Tensor,
        y: torch.Tensor,
        *,
        tokens: int,
        layout: str,
        **config: int,
    ) -> None:
        chosen = FewConfig(**config) if "col_tiles" in config else ManyConfig(**config)
        x = (codes, scales if fmt is FLEXQ else scales[:, 0])
        rows_apart = tokens if layout == "masked" else 0
        grouped_gemm(fmt, chosen, *x, w_chunks, row_scales, sizes, y, rows_apart=rows_apart)

    return of_cpu, grouped


def _dense(fmt: ExpertFormat, dtype: str) -> tuple[FunctionDefinition, FunctionDefinition]:
    def chunks(w: torch.Tensor) -> torch.Tensor:
        return pack_experts(w.contiguous().view(torch.int8))

    def configurations(workload: OperationWorkload) -> Sequence[dict[str, Any]]:
        values = dict(workload.values)
        in_bytes = values | {"k": 2 * int(values["k"])}
        return [config.as_dict() for config in configs_for(fmt, in_bytes)]

    of_cpu = on_cpu.dense(dtype)

    @kernel(
        "grouped_linear",
        of_cpu.name,
        dtype=dtype,
        backends=["cuda"],
        prepare_weight=chunks,
        configurations=configurations,
        min_capability=(9, 0),
        summary=f"{of_cpu.summary}, one launch over the experts that have tokens",
    )
    def grouped(
        x: torch.Tensor,
        w_chunks: torch.Tensor,
        sizes: torch.Tensor,
        y: torch.Tensor,
        *,
        tokens: int,
        layout: str,
        **config: int,
    ) -> None:
        rows_apart = tokens if layout == "masked" else 0
        chosen = FewConfig(**config)
        codes = x.view(torch.int8)
        grouped_gemm(fmt, chosen, codes, None, w_chunks, None, sizes, y, rows_apart=rows_apart)

    return of_cpu, grouped


KERNELS = (
    *(_declared(fmt, of_cpu) for fmt, of_dtypes in _OF_CPU for of_cpu in of_dtypes),
    *(_dense(fmt, dtype) for fmt, dtype in ((FP16, "fp16"), (BF16, "bf16"))),
)
