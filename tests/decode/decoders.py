"""Small models of both architectures, and kernels that only pretend to be quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexq_bench.decode.architecture import DecoderArchitecture, of_config
from flexq_bench.decode.decoder import Chunks
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.loading import linear_kernel, load
from flexq_bench.decode.model_weights import NamedWeights
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.weights import DenseWeights, WeightSource
from flexq_bench.kernels.contract import (
    Backend,
    Config,
    LinearKernel,
    PackedOperand,
)
from flexq_bench.kernels.decoder import DecoderOperations
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.runtime.ranks import ALONE, Ranks
from flexq_bench.schemes.linear_layers import with_linear_layers
from flexq_bench.schemes.registry import resolve

VOCAB = 320
_OWN = "own."
TRAINED = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
# "The following functions are", which that model goes on with 64 tokens that no other one is near.
SURE = [467, 277, 79, 76, 508, 281, 443, 83, 376]


class InMemoryWeights(DenseWeights, NamedWeights):
    """The tensors of a transformers model in memory."""

    def __init__(
        self, architecture: DecoderArchitecture, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(architecture, tensors)
        self.tensors = dict(tensors)

    def _tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class Small:
    """A random transformers model in FP16, and its weights as ours."""

    reference: Any
    source: InMemoryWeights


LIKE_LLAMA = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
WITH_EXPERTS = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}


def small_llama(device: torch.device, kind: str = "llama", **changes: Any) -> Small:
    """Two blocks, grouped queries; no K is a multiple of 128 but the feed-forward's.

    kind: of LIKE_LLAMA or WITH_EXPERTS.
    """
    import transformers

    of = getattr(transformers, f"{(LIKE_LLAMA | WITH_EXPERTS)[kind]}ForCausalLM")

    sizes = {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        "head_dim": 32,
        **changes,
    }
    return _small(of, of.config_class(**sizes), device)


def trained_llama(device: torch.device) -> Small:
    """A model that was trained, so that its tokens are seldom equally good."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float16).to(device).eval()
    config = {**reference.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    architecture = of_config(config, TRAINED.name)
    return Small(reference, InMemoryWeights(architecture, reference.state_dict()))


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
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.normal_(1.0, 0.2)
    model = model.to(device=device, dtype=torch.float16)
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None:  # its frequencies stay FP32 where a model is loaded from disk
        model.model.rotary_emb = type(rotary)(config).to(device)
    architecture = of_config({**config.to_dict(), "architectures": [of.__name__]}, "small")
    names = with_linear_layers(copy.deepcopy(model)) if architecture.dimensions.experts else model
    return Small(model, InMemoryWeights(architecture, names.state_dict()))


def small_experts(device: torch.device, kind: str = "qwen3_moe", **changes: Any) -> Small:
    """The same with eight experts in each block, of which a token uses three."""
    sizes = {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 160,
        "intermediate_size": 160,
        "norm_topk_prob": True,
        **changes,
    }
    return small_llama(device, kind, **sizes)


def an_engine(
    small: Small,
    scheme: str,
    operations: DecoderOperations,
    *,
    slots: int = 3,
    capacity: int = 128,
    kv_bits: int = 16,
    instead: Callable[[LinearKernel], LinearKernel] = lambda kernel: kernel,
    share: Callable[[WeightSource], WeightSource] = lambda source: source,
    ranks: Ranks = ALONE,
) -> Engine:
    """An engine on the model's device.

    instead: what stands for a kernel. share: of the weights, that is this rank's.
    """
    device = next(iter(small.source.tensors.values())).device

    def choose(kernel: LinearKernel, m: int, n: int, k: int) -> Config | None:
        return None

    def find(label: str, backend: Backend) -> LinearKernel:
        return instead(linear_kernel(label, backend))

    source = share(RoundedWeights(small.source, resolve(scheme)))
    model = load(source, device, capacity, choose, (slots,), find=find, ranks=ranks)
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


@torch.inference_mode()
def tokens_without_graphs(engine: Engine, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Return the tokens of `generate`, decoded without CUDA graphs."""
    batch, length = ids.shape
    slots = torch.arange(batch, device=ids.device)
    ends = torch.full_like(slots, length)
    engine.read(Chunks(ids, torch.zeros_like(slots), ends, slots, length), batch)
    for step in range(1, new):
        engine.advance(batch, engine.bucket(length + step))
    return engine.history[:batch, length : length + new].clone()


class FakeQuantized(LinearKernel):
    """GEMM in float64 of a kernel's dequantized codes: nothing of how the kernel computes."""

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
        packed.copy_from(self.pack_activation(self._kernel.quantize_activation(x)))

    def gemm(self, x: PackedOperand, w: PackedOperand, out: torch.Tensor, **given: Any) -> None:
        y, bias = x.buffers["values"] @ w.buffers["values"].T, given.get("bias")
        out.copy_(y if bias is None else y + bias.double())


class RoundedAlike(FakeQuantized):
    """The same, but what FP32 may round to either of two FP16 numbers goes where the kernel's does.

    Such a sum lies so near the middle between the two that the order of adding decides. If it goes
    the other way, the next layer may get another code, which all later positions then see.
    near: sums that may go either way; moved: those that went the other way; wrong: sums of the
    kernel that are neither of the two, which is its mistake and is not followed.
    """

    # Of the sum of all products' absolute values. FP32 rounds each sum of a group, and each partial
    # sum of those, to 2^-24 of itself, and products of both signs make such sums much smaller.
    # Where one operand is FP16, products themselves are added, in tensor cores that cut off.
    _OF_CODES, _OF_HALVES = 2.0**-23, 2.0**-21

    def __init__(self, kernel: LinearKernel) -> None:
        super().__init__(kernel)
        self.sums = self.near = self.moved = self.wrong = 0

    def pack_weight(self, weight: Operand) -> PackedOperand:
        return _both(super().pack_weight(weight), self._kernel.pack_weight(weight))

    def pack_activation(self, x: Operand) -> PackedOperand:
        return _both(super().pack_activation(x), self._kernel.pack_activation(x))

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        values = super().empty_activation(m, k, device)
        return _both(values, self._kernel.empty_activation(m, k, device))

    def gemm(self, x: PackedOperand, w: PackedOperand, out: torch.Tensor, **given: Any) -> None:
        theirs, bias = torch.empty_like(out), given.get("bias")
        self._kernel.gemm(_own(x), _own(w), theirs, **given)
        super().gemm(x, w, out, bias=bias)
        xs, ws = x.buffers["values"], w.buffers["values"]
        exact, terms = xs @ ws.T, xs.abs() @ ws.abs().T
        if bias is not None:
            exact, terms = exact + bias.double(), terms + bias.double().abs()
        of_codes = self.spec.weight.is_integer and self.spec.activation.is_integer
        error = terms * (self._OF_CODES if of_codes else self._OF_HALVES)
        low, high = (exact - error).half(), (exact + error).half()
        either = (low <= theirs) & (theirs <= high)
        self.sums += out.numel()
        self.near += int((low != high).sum())
        self.moved += int((either & (theirs != out)).sum())
        self.wrong += int((~either).sum())
        out.copy_(torch.where(either, theirs, out))


def _both(values: PackedOperand, of_kernel: PackedOperand) -> PackedOperand:
    named = {f"{_OWN}{name}": buffer for name, buffer in of_kernel.buffers.items()}
    return PackedOperand({**values.buffers, **named}, values.rows, values.k)


def _own(both: PackedOperand) -> PackedOperand:
    buffers = {
        name.removeprefix(_OWN): buffer
        for name, buffer in both.buffers.items()
        if name.startswith(_OWN)
    }
    return PackedOperand(buffers, both.rows, both.k)
