"""Layer maps of architectures: names of layers, and where their inputs come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import nn


@dataclass(frozen=True, slots=True)
class SiteInput:
    """The input of one or more sites: output channels of a module of the block ("": its own input).

    A scale on these channels may be divided out of `source` and multiplied into `kinds`
    (SmoothQuant, AWQ, OmniQuant, ABQ-LLM, DGQ).

    source: its name within the block. kinds: the sites that read it. through: "norm": its weight is
    one factor per channel; "linear": rows of its weight are channels; None: a scale can't be folded
    (an activation function in between, a norm without weights), and the entry only states that the
    kinds have the same input. shared_heads: how many times the kinds read each channel of `source`,
    once per query head of a key-value head (v_proj -> o_proj with grouped-query attention); usually
    1.
    """

    source: str
    kinds: tuple[str, ...]
    through: Literal["norm", "linear"] | None
    shared_heads: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of the parts of one model class of transformers.

    linears: path of each site within a block, in the order of the forward pass; its last part is
    the kind, including the part before if two sites would otherwise have the same kind. gated: the
    feed-forward has a gate (GLU). norm_offset: constant that a norm adds to its weight. attention:
    name of a block's attention. experts: path of a block's experts (linear_layers.Experts), whose
    layers come after `linears`; "": it has none. dense: the architecture of a mixture's blocks
    without experts; None: it has no such blocks. stored: pairs of a part of a weight's name here
    and its counterpart in files.
    """

    blocks: str
    linears: tuple[str, ...]
    site_inputs: tuple[SiteInput, ...]
    gated: bool
    norm_offset: float = 0.0
    attention: str = "self_attn"
    experts: str = ""
    dense: Architecture | None = None
    stored: tuple[tuple[str, str], ...] = ()

    def kind_of(self, path: str) -> str:
        """Return the kind of the site at a path within a block."""
        experts = f"{self.experts}."
        if self.experts and path.startswith(experts):
            return f"experts.{path.removeprefix(experts)}"
        last = path.rsplit(".", 1)[-1]
        alike = [
            other
            for other in self.linears
            if other.rsplit(".", 1)[-1] == last and not (self.experts and other.startswith(experts))
        ]
        return last if len(alike) == 1 else ".".join(path.rsplit(".", 2)[-2:])


_LLAMA = Architecture(
    blocks="model.layers",
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
    site_inputs=(
        SiteInput("input_layernorm", ("q_proj", "k_proj", "v_proj"), "norm"),
        SiteInput("self_attn.v_proj", ("o_proj",), "linear"),
        SiteInput("post_attention_layernorm", ("gate_proj", "up_proj"), "norm"),
        SiteInput("mlp.up_proj", ("down_proj",), "linear"),
    ),
    gated=True,
)
_GEMMA = replace(_LLAMA, norm_offset=1.0)
# Norms after attention and before the feed-forward are different modules here.
_GEMMA_2 = replace(
    _GEMMA,
    site_inputs=(
        *_LLAMA.site_inputs[:2],
        SiteInput("pre_feedforward_layernorm", ("gate_proj", "up_proj"), "norm"),
        _LLAMA.site_inputs[3],
    ),
)
# Norms come after attention and the feed-forward, and their outputs are added to what both read.
_OLMO_2 = replace(
    _LLAMA,
    site_inputs=(
        replace(_LLAMA.site_inputs[0], source="", through=None),
        _LLAMA.site_inputs[1],
        replace(_LLAMA.site_inputs[2], through=None),
        _LLAMA.site_inputs[3],
    ),
)
# Attention and feed-forward read the output of one norm. StableLM's may be one after the other.
_COHERE = replace(
    _LLAMA,
    site_inputs=(
        SiteInput(
            "input_layernorm", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "norm"
        ),
        _LLAMA.site_inputs[1],
        _LLAMA.site_inputs[3],
    ),
)
# No gate; the square of a ReLU passes no scale through as it is.
_ARCEE = replace(
    _LLAMA,
    linears=(*_LLAMA.linears[:4], "mlp.up_proj", "mlp.down_proj"),
    site_inputs=(
        *_LLAMA.site_inputs[:2],
        SiteInput("post_attention_layernorm", ("up_proj",), "norm"),
        SiteInput("mlp.up_proj", ("down_proj",), None),
    ),
    gated=False,
)
_NEMOTRON = replace(_ARCEE, norm_offset=1.0)
# Fused layers: only some of their rows are channels of the next one.
_GLM = replace(
    _LLAMA,
    linears=(*_LLAMA.linears[:4], "mlp.gate_up_proj", "mlp.down_proj"),
    site_inputs=(
        *_LLAMA.site_inputs[:2],
        SiteInput("post_attention_layernorm", ("gate_up_proj",), "norm"),
        SiteInput("mlp.gate_up_proj", ("down_proj",), None),
    ),
)
_PHI_3 = replace(
    _GLM,
    linears=("self_attn.qkv_proj", "self_attn.o_proj", *_GLM.linears[4:]),
    site_inputs=(
        SiteInput("input_layernorm", ("qkv_proj",), "norm"),
        SiteInput("self_attn.qkv_proj", ("o_proj",), None),
        *_GLM.site_inputs[2:],
    ),
)
_STARCODER_2 = replace(
    _LLAMA,
    linears=(*_LLAMA.linears[:4], "mlp.c_fc", "mlp.c_proj"),
    site_inputs=(
        *_LLAMA.site_inputs[:2],
        SiteInput("post_attention_layernorm", ("c_fc",), "norm"),
        SiteInput("mlp.c_fc", ("c_proj",), None),  # GELU passes no scale through
    ),
    gated=False,
)
_OPT = Architecture(
    blocks="model.decoder.layers",
    linears=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "fc1",
        "fc2",
    ),
    site_inputs=(
        SiteInput("self_attn_layer_norm", ("q_proj", "k_proj", "v_proj"), "norm"),
        SiteInput("self_attn.v_proj", ("out_proj",), "linear"),
        SiteInput("final_layer_norm", ("fc1",), "norm"),
        SiteInput("fc1", ("fc2",), "linear"),  # ReLU passes positive scales through
    ),
    gated=False,
)
# OPT-350M: as in OLMo 2, norms come after attention and after the feed-forward.
_OPT_350M = replace(
    _OPT,
    site_inputs=(
        replace(_OPT.site_inputs[0], source="", through=None),
        _OPT.site_inputs[1],
        SiteInput("self_attn_layer_norm", ("fc1",), None),
        _OPT.site_inputs[3],
    ),
)
# GPT-2: its Conv1D layers, once they are linear ones (`with_linear_layers`). GELU in between.
_GPT_2 = Architecture(
    blocks="transformer.h",
    linears=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    site_inputs=(
        SiteInput("ln_1", ("c_attn",), "norm"),
        SiteInput("attn.c_attn", ("attn.c_proj",), None),
        SiteInput("ln_2", ("c_fc",), "norm"),
        SiteInput("mlp.c_fc", ("mlp.c_proj",), None),
    ),
    gated=False,
    attention="attn",
)
# Pythia too. Attention and feed-forward read one input, each through a norm of its own.
_GPT_NEOX = Architecture(
    blocks="gpt_neox.layers",
    linears=(
        "attention.query_key_value",
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    site_inputs=(
        SiteInput("input_layernorm", ("query_key_value",), "norm"),
        SiteInput("attention.query_key_value", ("dense",), None),
        SiteInput("post_attention_layernorm", ("dense_h_to_4h",), "norm"),
        SiteInput("mlp.dense_h_to_4h", ("dense_4h_to_h",), None),
    ),
    gated=False,
    attention="attention",
    stored=(("lm_head.", "embed_out."),),
)
# Phi 1 to 2: attention and feed-forward read the output of one norm.
_PHI = replace(
    _LLAMA,
    linears=(*_LLAMA.linears[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    site_inputs=(
        SiteInput("input_layernorm", ("q_proj", "k_proj", "v_proj", "fc1"), "norm"),
        SiteInput("self_attn.v_proj", ("dense",), "linear"),
        SiteInput("mlp.fc1", ("fc2",), None),
    ),
    gated=False,
)
_GPT_J = Architecture(
    blocks="transformer.h",
    linears=(
        *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
        *("mlp.fc_in", "mlp.fc_out"),
    ),
    site_inputs=(
        SiteInput("ln_1", ("q_proj", "k_proj", "v_proj", "fc_in"), "norm"),
        SiteInput("attn.v_proj", ("out_proj",), "linear"),
        SiteInput("mlp.fc_in", ("fc_out",), None),
    ),
    gated=False,
    attention="attn",
)
# Falcon 7B: as Phi. 40B and 180B have two norms, RW models one after the other.
_FALCON = Architecture(
    blocks="transformer.h",
    linears=(
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    site_inputs=(
        SiteInput("input_layernorm", ("query_key_value", "dense_h_to_4h"), "norm"),
        SiteInput("self_attention.query_key_value", ("dense",), None),
        SiteInput("mlp.dense_h_to_4h", ("dense_4h_to_h",), None),
    ),
    gated=False,
    attention="self_attention",
)


def _falcon_with_norms(attention: str, feed_forward: str) -> Architecture:
    first = SiteInput(attention, ("query_key_value",), "norm")
    second = SiteInput(feed_forward, ("dense_h_to_4h",), "norm")
    between, last = _FALCON.site_inputs[1:]
    return replace(_FALCON, site_inputs=(first, between, second, last))


# One norm after the other, as in Falcon's RW models.
_BLOOM = _falcon_with_norms("input_layernorm", "post_attention_layernorm")

# Mixtures of experts: as LLaMA but for the feed-forward. The router reads what the experts read, so
# no scale passes there.
_QWEN_3_MOE = replace(
    _LLAMA,
    linears=_LLAMA.linears[:4],
    site_inputs=_LLAMA.site_inputs[:2],
    experts="mlp.experts",
    dense=_LLAMA,
)


def _with_shared_expert(path: str, mixture: Architecture = _QWEN_3_MOE) -> Architecture:
    """Add an expert that reads every token to those that the router chooses."""
    return replace(
        mixture,
        linears=(
            *mixture.linears,
            *(f"{path}.{layer}" for layer in ("gate_proj", "up_proj", "down_proj")),
        ),
        site_inputs=(
            *mixture.site_inputs,
            SiteInput("post_attention_layernorm", ("gate_proj", "up_proj"), None),
            SiteInput(f"{path}.up_proj", ("down_proj",), "linear"),
        ),
    )


_QWEN_2_MOE = _with_shared_expert("mlp.shared_expert")
# Several shared experts are one with as many times the channels.
_GLM_4_MOE = _with_shared_expert("mlp.shared_experts")
_ERNIE_4_5_MOE = replace(_GLM_4_MOE, stored=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),))


def _deepseek(*, compressed_queries: bool) -> Architecture:
    """Multi-head latent attention: layers of low rank with a norm between them, and a mixture.

    compressed_queries: queries have a low rank too, not only keys and values (`q_lora_rank`).
    """
    first = "q_a_proj" if compressed_queries else "q_proj"
    second = ("q_b_proj",) if compressed_queries else ()
    linears = (first, *second, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    of_queries = (SiteInput("self_attn.q_a_layernorm", second, "norm"),) if second else ()
    attention = replace(
        _QWEN_3_MOE,
        linears=tuple(f"self_attn.{layer}" for layer in linears),
        site_inputs=(
            SiteInput("input_layernorm", (first, "kv_a_proj_with_mqa"), "norm"),
            *of_queries,
            SiteInput("self_attn.kv_a_layernorm", ("kv_b_proj",), "norm"),
            # Rows of kv_b_proj are keys as well as values.
            SiteInput("self_attn.kv_b_proj", ("o_proj",), None),
        ),
    )
    dense = replace(
        _LLAMA,
        linears=(*attention.linears, *_LLAMA.linears[4:]),
        site_inputs=(*attention.site_inputs, *_LLAMA.site_inputs[2:]),
    )
    return _with_shared_expert("mlp.shared_experts", replace(attention, dense=dense))


_DEEPSEEK = _deepseek(compressed_queries=True)
_MIXTRAL = replace(
    _QWEN_3_MOE,
    stored=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
)
_GRANITE_MOE = replace(
    _QWEN_3_MOE,
    experts="block_sparse_moe.experts",
    stored=(
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ),
)

ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "MinistralForCausalLM": _LLAMA,
    "HeliumForCausalLM": _LLAMA,
    "Ernie4_5ForCausalLM": _LLAMA,
    "SeedOssForCausalLM": _LLAMA,
    "HunYuanDenseV1ForCausalLM": _LLAMA,
    "StableLmForCausalLM": _LLAMA,
    "OlmoForCausalLM": _LLAMA,
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": _OLMO_2,
    "Exaone4ForCausalLM": _OLMO_2,
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": _COHERE,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "ArceeForCausalLM": _ARCEE,
    "NemotronForCausalLM": _NEMOTRON,
    "Phi3ForCausalLM": _PHI_3,
    "Starcoder2ForCausalLM": _STARCODER_2,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2,
    "OPTForCausalLM": _OPT,
    "GPT2LMHeadModel": _GPT_2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "GPTJForCausalLM": _GPT_J,
    "BloomForCausalLM": _BLOOM,
    "PhiForCausalLM": _PHI,
    "FalconForCausalLM": _FALCON,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2MoeForCausalLM": _QWEN_2_MOE,
    "Qwen3MoeForCausalLM": _QWEN_3_MOE,
    "OlmoeForCausalLM": _QWEN_3_MOE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "Glm4MoeForCausalLM": _GLM_4_MOE,
    "Ernie4_5_MoeForCausalLM": _ERNIE_4_5_MOE,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
}


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture of a model of transformers, as its configuration has it; None: no map."""
    names, config = ARCHITECTURES.get(type(model).__name__), cast(Any, model.config)
    if names is _OPT and not config.do_layer_norm_before:
        return _OPT_350M
    if type(model).__name__ == "StableLmForCausalLM" and config.use_parallel_residual:
        return _COHERE
    if names is _ERNIE_4_5_MOE and not config.moe_num_shared_experts:
        return replace(_QWEN_3_MOE, stored=names.stored)
    if names is _DEEPSEEK and config.q_lora_rank is None:
        return _deepseek(compressed_queries=False)
    if names is _FALCON:
        first = model.get_submodule(f"{_FALCON.blocks}.0")
        for norms in (("ln_attn", "ln_mlp"), ("input_layernorm", "post_attention_layernorm")):
            if all(hasattr(first, name) for name in norms):
                return _falcon_with_norms(*norms)
    return names
