"""`flexq`: FlexQ's formats on binary or int8 tensor cores, whichever is faster for the case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    LinearKernel,
    PackedOperand,
    Packing,
    check_gemm,
)
from flexq_bench.kernels.cuda.btc import MAX_TOKENS, BinaryTensorCoreGemm
from flexq_bench.kernels.cuda.imma.configuration_choice import bucket_of
from flexq_bench.kernels.cuda.imma.gemm import Int8TensorCoreGemm
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.gemm import GemmWorkload

_BINARY, _INT8 = "btc", "imma"


@dataclass(frozen=True, slots=True)
class FlexqConfig(Config):
    """engine: "btc" or "imma"; choice: that engine's configuration."""

    engine: str
    choice: Config

    def as_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, **asdict(self.choice)}


class FlexqGemm(CheckedGemm):
    """`flexq` (W6A6) and `flexq[w6a8]`.

    Packed weights and activations are in both layouts; `narrow` selects the weights' layout of one
    configuration.
    """

    def __init__(self, a_bits: int, variant: str = "") -> None:
        binary, int8 = BinaryTensorCoreGemm(a_bits), Int8TensorCoreGemm(a_bits)
        self._engines: dict[str, LinearKernel] = {_BINARY: binary, _INT8: int8}
        self.spec = KernelSpec(
            name="flexq",
            variant=variant,
            backend="cuda",
            weight=int8.spec.weight,
            activation=int8.spec.activation,
            summary=f"FlexQ W6A{a_bits}, the faster of flexq-w6a{a_bits} and "
            f"flexq-imma-w6a{a_bits}",
            overlaps_launches=True,
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        return _merge({name: e.pack_weight(weight) for name, e in self._engines.items()})

    def narrow(self, w: PackedOperand, config: Config | None) -> PackedOperand:
        chosen = self._chosen(config, GemmWorkload(1, w.rows, w.k))
        return _merge({chosen.engine: _part(w, chosen.engine)})

    def pack_activation(self, x: Operand) -> PackedOperand:
        return _merge({name: e.pack_activation(x) for name, e in self._engines.items()})

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        engines = self._engines.items()
        return _merge({name: e.empty_activation(m, k, device) for name, e in engines})

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        for name, engine in self._engines.items():
            engine.activate(x, _part(packed, name))

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = self._chosen(config, shape)
        operands = _part(x, chosen.engine), _part(w, chosen.engine)
        self._engines[chosen.engine].gemm(*operands, out, bias=bias, config=chosen.choice)

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        chosen = self._chosen(config, check_gemm(packed, w, out))
        operands = _part(packed, chosen.engine), _part(w, chosen.engine)
        engine = self._engines[chosen.engine]
        engine.linear(x, *operands, out, bias=bias, config=chosen.choice)

    def packing(self, x: PackedOperand, config: Config | None) -> Packing | None:
        chosen = self._chosen(config, GemmWorkload(x.rows, 1, x.k))
        engine = self._engines[chosen.engine]
        return engine.packing(_part(x, chosen.engine), chosen.choice)

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        # Beyond MAX_TOKENS the binary kernel reads the weights again for every MAX_TOKENS.
        has_binary = current_gpu().capability <= self._engines[_BINARY].spec.max_capability
        names = (_BINARY, _INT8) if has_binary and gemm.m <= MAX_TOKENS else (_INT8,)
        return [
            FlexqConfig(name, choice)
            for name in names
            for choice in self._engines[name].candidates(gemm)
        ]

    def tuning_bucket(self, m: int) -> int:
        return bucket_of(m)

    def default_config(self, gemm: GemmWorkload) -> FlexqConfig:
        choice = self._engines[_INT8].default_config(gemm)
        assert choice is not None  # this engine always has one
        return FlexqConfig(_INT8, choice)

    def builds(self) -> Sequence[Build]:
        return [build for engine in self._engines.values() for build in engine.builds()]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = self._chosen(config, gemm)
        return self._engines[chosen.engine].builds_for(gemm, chosen.choice)

    def _chosen(self, config: Config | None, gemm: GemmWorkload) -> FlexqConfig:
        return config if isinstance(config, FlexqConfig) else self.default_config(gemm)


def _merge(parts: dict[str, PackedOperand]) -> PackedOperand:
    first = next(iter(parts.values()))
    buffers = {
        f"{engine}.{name}": buffer
        for engine, part in parts.items()
        for name, buffer in part.buffers.items()
    }
    return PackedOperand(buffers, first.rows, first.k)


def _part(packed: PackedOperand, engine: str) -> PackedOperand:
    prefix = f"{engine}."
    buffers = {
        name.removeprefix(prefix): buffer
        for name, buffer in packed.buffers.items()
        if name.startswith(prefix)
    }
    if not buffers:
        raise ShapeError(f"narrowed weights have no {engine} layout: pack them again")
    return PackedOperand(buffers, packed.rows, packed.k)
