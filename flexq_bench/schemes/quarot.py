"""QuaRot: the model rotated so that no channel has outliers, then rounded to nearest.

Ashkboos et al., arXiv 2404.00456. The residual stream is rotated by a Hadamard matrix with random
signs, which is folded into the weights that read it or write to it, including the embedding and the
output head. Weights of norms are folded into their readers first, because only a norm without
weights commutes with a rotation (section 4, stage 1a). The inputs of down_proj and o_proj are
rotated at run time (stages 1b and 1c); their weights contain the inverse. `rotation` constructs the
Hadamard matrices.

Differences: the whole input of o_proj is rotated at run time, where the paper folds the part within
a head into v_proj; keys and values are cached unrotated (stage 1d only affects the cache); weights
are rounded to nearest over their full range, without GPTQ or a search for a clipping ratio. The
clipping ratio of activations is an option; no kernel has the paper's 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_map import LinearSite, linear_at, weight_of
from flexq_bench.schemes.rotation import Rotation, online_rotation, residual_rotation
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import readers_of
from flexq_bench.schemes.uniform import uniform_format

# Blocks that read the residual stream through RMS norms, and write to it without one.
_ROTATABLE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
_ONLINE = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class QuaRotOptions(SchemeOptions):
    """Bits of weights and activations; 16: not quantized. group: along K; None: a row, a token.

    activation_clip: share of a token's range that its codes span.
    """

    w_bits: int
    a_bits: int
    group: int | None = None
    activation_clip: float = 1.0

    def __post_init__(self) -> None:
        self.activation  # noqa: B018 - it says what is wrong with the clip

    @property
    def weight(self) -> NumberFormat:
        return uniform_format(self.w_bits, self.group)

    @property
    def activation(self) -> NumberFormat:
        number = uniform_format(self.a_bits, self.group)
        return number if number.is_dense else replace(number, clip=self.activation_clip)


class QuaRot(Scheme):
    """Rotated, then symmetric integers rounded to nearest."""

    source = "QuaRot, arXiv:2404.00456, section 4"
    options: QuaRotOptions
    changes_ends = True

    def layer_formats(self, kind: str, gated: bool) -> LayerFormats:
        return LayerFormats(self.options.weight, self.options.activation, kind in _ONLINE)

    def prepare(self, state: QuantizationState) -> None:
        """Rotate the embedding, and the output head with the weights of the last norm.

        Raises QuantizeError for architectures that can't be rotated.
        """
        model: Any = state.model
        if state.layout.architecture not in _ROTATABLE:
            raise QuantizeError(
                f"{self.name} rotates {', '.join(_ROTATABLE)}, not {state.layout.architecture}: "
                "pick another scheme"
            )
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        norm = model.get_submodule(state.layout.path.partition(".")[0]).norm
        rotation = self.residual_rotation(state)
        state.rotations.append(rotation)
        folded = rotation.apply(head.weight.detach().double() * norm.weight.detach().double())
        rotated = rotation.apply(embedding.weight.detach().double())
        # FP16 as in checkpoints. If embedding and head were one tensor, they are separate ones now.
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
        for module, values in ((head, folded), (embedding, rotated)):
            halves = values.to(torch.float16).to(module.weight.dtype)
            module.weight = nn.Parameter(halves, requires_grad=module.weight.requires_grad)
        _set_(norm.weight, torch.ones_like(norm.weight))

    def residual_rotation(self, state: QuantizationState) -> Rotation:
        """Return the rotation of the residual stream, on the model's device."""
        model: Any = state.model
        device = next(model.get_input_embeddings().parameters()).device
        return residual_rotation(int(model.config.hidden_size), state.seed).to(device)

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        (rotation,) = state.rotations
        prefix = f"{state.layout.path}.{block}."
        norms: list[Any] = []
        for site_input in state.layout.inputs_of(block):
            scale = None
            if site_input.through == "norm":
                norms.append(state.model.get_submodule(prefix + site_input.source).weight)
                scale = norms[-1].detach().double()
            for site in readers_of(state, block, site_input):
                self._quantize_site(state, site, rotation, scale)
        for weight in norms:
            _set_(weight, torch.ones_like(weight))

    def _quantize_site(
        self,
        state: QuantizationState,
        site: LinearSite,
        rotation: Rotation,
        scale: torch.Tensor | None,
    ) -> None:
        """Rotate and quantize a site.

        scale: of the norm that the site reads; None: it writes to the residual stream.
        """
        weight, online = weight_of(state.model, site).double(), None
        if scale is not None:
            weight = rotation.apply(weight * scale)
            # Channels that a norm multiplies by zero have zero weights, so any divisor is valid.
            state.folds.inputs[site.name] = torch.where(scale == 0, 1.0, scale)
            state.folds.rotated_inputs[site.name] = rotation
        else:
            online = online_rotation(site.k).to(weight.device)
            weight = rotation.apply(online.apply(weight).T).T.contiguous()
            state.folds.rotated_outputs[site.name] = rotation
            bias = linear_at(state.model, site.name).bias
            if bias is not None:
                _set_(bias, rotation.apply(bias.detach().double()))
        rounded = quantize(weight, self.options.weight)
        activation = dynamic(self.options.activation)
        quantize_site(state.model, site, rounded, activation, rotation=online)


@torch.no_grad()
def _set_(parameter: torch.Tensor, values: torch.Tensor) -> None:
    parameter.copy_(values.to(parameter))
