"""A transformers model whose logits are computed by the forward pass of `decode`.

Linear layers, norms, rotary embedding, attention, activation function and residual sums are those
of flexq_bench.decode.decoder, in FP16, on the operators of kernels.decoder: an evaluation through
kernels evaluates the computation that is decoded.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.decode.architecture import DecoderArchitecture, of_config
from flexq_bench.decode.fused_layers import UnlikePartsError
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.decode.loading import load
from flexq_bench.decode.model_weights import NamedWeights
from flexq_bench.decode.text_decoder import TextDecoder, TextState
from flexq_bench.decode.weights import WeightSource
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import KernelError
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.quantized_layer import QuantizedLayer

DTYPE = "float16"  # data type between linear layers

log = logging.getLogger(__name__)


def decoded_architecture(model: Any) -> DecoderArchitecture | None:
    """Return a model's architecture for decode; None: decode doesn't support it, or has experts."""
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    try:
        architecture = of_config(described, type(model).__name__)
    except UsageError:
        return None
    return None if architecture.dimensions.experts is not None else architecture


def compute_as_decode(model: Any, source: WeightSource, kv_bits: int) -> bool:
    """Replace a model's forward pass by decode's; False: it can't be, and nothing was changed.

    model: of transformers, its quantized layers are KernelLinears. source: its weights, in the form
    that decode loads. kv_bits: of keys and values. The modules themselves are unchanged: they can
    still be called one by one, or all through type(model).forward. Raises QuantizeError if no
    kernel can run a layer.
    """
    device = model.get_input_embeddings().weight.device
    length = source.architecture.dimensions.context
    try:
        loaded = load(source, device, length, lambda *_: None, (1,))
    except UnlikePartsError as error:
        log.info("transformers computes what is between the linear layers: %s", error)
        return False
    except KernelError as error:
        raise QuantizeError(f"{source.architecture.dimensions.name}: {error}") from error
    model.forward = _Forward(TextDecoder(loaded, kv_bits=kv_bits))
    return True


class ModelWeights(NamedWeights):
    """Weights of a transformers model in memory, whose quantized layers have codes."""

    def __init__(self, architecture: DecoderArchitecture, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        super().__init__(architecture, self._parameters)

    def _layer(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedLayer:
        module = self._model.get_submodule(name)
        if isinstance(module, KernelLinear | FakeQuantizedLinear):
            return module.layer.to(device)
        return super()._layer(name, shape, device)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._parameters[name].detach()


class DecodedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of texts in decode's form.

    capacity: initial size in tokens per text, as in Engine; it grows.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self._capacity = capacity
        self.state: TextState | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.state is None else self.state.longest

    def state_of(self, decoder: TextDecoder, texts: int, tokens: int) -> TextState:
        """Return the state, created if there is none; `tokens` are about to be added."""
        if self.state is None:
            self.state = decoder.empty(texts, max(self._capacity, tokens))
        return self.state


class _Forward:
    """Replacement for the forward method of a transformers model."""

    def __init__(self, decoder: TextDecoder) -> None:
        self.decoder = decoder

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits FP16 [B, T, vocab], or of the last token only (logits_to_keep 1).

        attention_mask: [B, T so far]; 0: padding before or after a text. position_ids: ignored;
        positions are computed from the mask. Raises QuantizeError if an activation exceeds FP16,
        AccuracyError for a cache with tokens of another class, and for other values of
        logits_to_keep.
        """
        if logits_to_keep not in (0, 1):
            raise AccuracyError(f"logits of the last {logits_to_keep} tokens: all there are, or 1")
        cache = self._cache(past_key_values)
        context = self.decoder.model.architecture.dimensions.context
        if cache.get_seq_length() + input_ids.shape[1] > context:
            raise AccuracyError(
                f"decode has texts of up to {context} tokens of this model, its context or sliding "
                "window: give a shorter --context, or evaluate --through reference"
            )
        state = cache.state_of(self.decoder, *input_ids.shape)
        last_only, keep = logits_to_keep == 1, use_cache or past_key_values is not None
        try:
            logits = self._read(input_ids, attention_mask, state, last_only=last_only)
        except (KernelError, ValueError) as error:
            raise QuantizeError(f"through kernels: {error}") from error
        if not bool(torch.isfinite(logits.sum(dtype=torch.float32))):
            raise QuantizeError(
                "through kernels the model predicts NaN or infinity: kernels take and give FP16, "
                "up to 65,504; evaluate --through reference, or do not quantize this model"
            )
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache if keep else None)

    def _read(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        state: TextState,
        *,
        last_only: bool,
    ) -> torch.Tensor:
        own = None if mask is None else mask[:, -ids.shape[1] :].bool()
        if own is None or bool(own.all()):
            return self.decoder.read(ids, state, last_only=last_only)
        order = own.logical_not().int().argsort(dim=1, stable=True)  # padding last
        counts = own.sum(dim=1)
        logits = self.decoder.read(ids.gather(1, order), state, counts=counts, last_only=last_only)
        if last_only:
            return logits
        back = order.argsort(dim=1)[..., None].expand_as(logits)
        return logits.gather(1, back)

    def _cache(self, cache: Any) -> DecodedCache:
        if isinstance(cache, DecodedCache):
            return cache
        if cache is not None and cache.get_seq_length() > 0:
            raise AccuracyError("a model that computes as decode was given the cache of another")
        return DecodedCache()
