"""Small models of both architectures, and kernels that only pretend to be quantized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexq_bench.decode.architecture import of_config
from flexq_bench.decode.checkpoints import StateDictWeights
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import linear_kernel, load
from kernels.contract import (
    Backend,
    Config,
    LinearKernel,
    PackedOperand,
)
from kernels.decoder import DecoderOperations
from kernels.formats import Operand
from workloads.schemes import get_scheme

VOCAB = 320
TRAINED = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
# "The following functions are", which that model goes on with 64 tokens that no other one is near.
SURE = [467, 277, 79, 76, 508, 281, 443, 83, 376]


@dataclass(frozen=True, slots=True)
class Small:
    """A random transformers model in FP16, and its weights as ours."""

    reference: Any
    source: StateDictWeights


def small_llama(device: torch.device, **changes: Any) -> Small:
    """Two blocks, grouped queries; no K is a multiple of 128 but the feed-forward's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        **changes,
    }
    return _small(LlamaForCausalLM, LlamaConfig(**sizes), device)


def trained_llama(device: torch.device) -> Small:
    """A model that was trained, so that its tokens are seldom equally good."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float16).to(device).eval()
    config = {**reference.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    architecture = of_config(config, TRAINED.name)
    return Small(reference, StateDictWeights(architecture, reference.state_dict()))


def small_opt(device: torch.device, **changes: Any) -> Small:
    """Two blocks with biases that are not zero."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "hidden_size": 160,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 160,
        "init_std": 0.08,
        **changes,
    }
    return _small(OPTForCausalLM, OPTConfig(**sizes), device)


def _small(of: Any, config: Any, device: torch.device) -> Small:
    torch.manual_seed(1)
    model = of(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    model = model.to(device=device, dtype=torch.float16)
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None:  # its frequencies stay FP32 where a model is loaded from disk
        model.model.rotary_emb = type(rotary)(config).to(device)
    architecture = of_config({**config.to_dict(), "architectures": [of.__name__]}, "small")
    return Small(model, StateDictWeights(architecture, model.state_dict()))


def an_engine(
    small: Small,
    scheme: str,
    operations: DecoderOperations,
    *,
    slots: int = 3,
    capacity: int = 128,
    kv_bits: int = 16,
    fake: bool = False,
) -> Engine:
    """An engine on the model's device. fake: torch computes with what the codes stand for."""
    device = next(iter(small.source._tensors.values())).device

    def choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
        return None

    def find(label: str, backend: Backend) -> LinearKernel:
        kernel = linear_kernel(label, backend)
        return FakeQuantized(kernel) if fake else kernel

    model = load(small.source, get_scheme(scheme), device, capacity, choose, (slots,), find=find)
    return Engine(
        model,
        operations,
        choose,
        slots=slots,
        capacity=capacity,
        kv_bits=kv_bits,
    )


def prompts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    drawn = torch.randint(3, VOCAB, (batch, length), generator=generator, dtype=torch.int32)
    return drawn.to(device)


class FakeQuantized(LinearKernel):
    """FP32 GEMM of a kernel's dequantized codes: it shares nothing with how the kernel computes."""

    def __init__(self, kernel: LinearKernel) -> None:
        self.spec = kernel.spec
        self._kernel = kernel

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        return self._kernel.quantize_weight(weight)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        values = weight.dequantize()
        return PackedOperand({"values": values.double()}, weight.rows, weight.k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        return PackedOperand({"values": x.dequantize().double()}, x.rows, x.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        values = torch.zeros(m, k, dtype=torch.float64, device=device)
        return PackedOperand({"values": values}, m, k)

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        codes = self._kernel.quantize_activation(x)
        packed.buffers["values"].copy_(codes.dequantize())

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        y = x.buffers["values"] @ w.buffers["values"].T
        out.copy_(y if bias is None else y + bias.double())
