"""bitsandbytes: W8A8 as LLM.int8() does it, and NF4 weights with FP16 activations.

`bitsandbytes-int8` is LLM.int8() (arXiv 2208.07339) without outlier decomposition (threshold 0):
one scale per token and one per output feature, cuBLASLt's int8 GEMM as the library calls it, and
the library's scaling kernel. `bitsandbytes-nf4` is 4-bit NormalFloat in blocks of 64 (QLoRA, arXiv
2305.14314) with FP32 scales. The library chooses between its fused kernel and a dequantization
followed by a dense GEMM.
"""

from __future__ import annotations

from typing import Any

import torch

from flexq_bench.kernels.external.declare import linear_kernel
from flexq_bench.kernels.external_packages.packages import BITSANDBYTES, load

_LARGEST = 127.0  # bitsandbytes stores largest magnitudes, 127 times our scales
_BLOCK, _TYPE = 64, "nf4"
_FP16_BITS = 11  # 1/127² is a rounded constant in it
_COMMON: dict[str, Any] = {
    "backends": ["cuda"],
    "returns": True,
    "rounds_to": _FP16_BITS,
    "package": BITSANDBYTES,
    "version": 2,  # its result was copied before
}


def _functional() -> Any:
    return load(BITSANDBYTES, "functional")


def _with_largest(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, (scales[:, 0].double() * _LARGEST).float()


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, largest, _ = _functional().int8_vectorwise_quant(x)
    return codes, largest


@linear_kernel(
    "bitsandbytes-int8",
    weight="int8/row",
    activation="int8/row@fp32",
    prepare_weight=_with_largest,
    prepare_activation=_with_largest,
    quantize_activation=_quantized,
    **_COMMON,
)
def int8(x: torch.Tensor, of_x: torch.Tensor, w: torch.Tensor, of_w: torch.Tensor) -> torch.Tensor:
    """LLM.int8() of bitsandbytes, without outlier decomposition."""
    functional = _functional()
    y: torch.Tensor = functional.int8_mm_dequant(functional.int8_linear_matmul(x, w), of_x, of_w)
    return y


def _four_bit(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantize again, which is exact: the largest value of a block has code 1 or -1."""
    codes, state = _functional().quantize_4bit(w.contiguous(), blocksize=_BLOCK, quant_type=_TYPE)
    return codes, state.absmax, state.code


@linear_kernel("bitsandbytes-nf4", weight=f"nf4/{_BLOCK}", prepare_weight=_four_bit, **_COMMON)
def normal_float(
    x: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor, table: torch.Tensor, *, n: int
) -> torch.Tensor:
    """NF4 of bitsandbytes, FP32 scales of blocks, FP16 activations."""
    state = _functional().QuantState(
        absmax=largest,
        shape=torch.Size((n, x.shape[1])),
        code=table,
        blocksize=_BLOCK,
        quant_type=_TYPE,
        dtype=torch.float16,
    )
    y: torch.Tensor = load(BITSANDBYTES).matmul_4bit(x, codes, state)
    return y
