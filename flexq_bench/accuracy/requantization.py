"""Repetition of a checkpoint's quantization from the original, and its evaluation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flexq_bench.accuracy.agreement import Agreement, AgreementMeter, ReferenceLogits
from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity, text_length
from flexq_bench.accuracy.plan import CalibrationPlan
from flexq_bench.accuracy.texts import tokenize
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import device_kind
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.schemes.activations import (
    ActivationQuantizer,
    DynamicActivation,
    StaticActivation,
    of_all_tokens,
)
from flexq_bench.schemes.calibration import Calibration, calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.schemes.scheme import Scheme


class RequantizedModel:
    """A quantized model on the first segments of a text, each of which is computed once.

    reference: the original's predictions on these segments; may be extended.
    """

    def __init__(self, scheme: str, text: str, model: Any, reference: ReferenceLogits) -> None:
        self.scheme, self.text = scheme, text
        self.model = model
        self._meter = AgreementMeter(reference)
        self._result: PerplexityResult | None = None

    def first(self, tokens: TextTokens, count: int, context: int) -> PerplexityResult:
        """Return the perplexity on the first `count` >= 1 segments, or on more if known."""
        done = 0 if self._result is None else len(self._result.nll)
        if self._result is None or count > done:
            length = text_length(context, tokens.bos)
            more = perplexity(
                self.model,
                tokens.ids[done * length : count * length],
                context=context,
                on_logits=self._meter,
                bos=tokens.bos,
            )
            self._result = more if self._result is None else self._result.followed_by(more)
        return self._result

    def agreement(self) -> Agreement:
        """Return the agreement with the original on the segments evaluated so far."""
        return self._meter.result()


def quantized_copy(
    original: Any, scheme: Scheme, calibration: Calibration | None, *, seed: int, kv_bits: int
) -> Any:
    """Return a copy of the original that is quantized by a scheme, through the reference."""
    copied = copy.deepcopy(original)
    scheme.quantize(copied, calibration, seed=seed)
    quantize_cache(copied, kv_bits)
    return copied


def as_checkpoint(
    checkpoint: QuantizedCheckpoint,
    scheme: Scheme,
    original: LoadedModel,
    text: CalibrationPlan | None,
) -> Any:
    """Quantize a copy of the original like the checkpoint, through the reference.

    text: of the calibration; number and length of its segments are those of the checkpoint. Raises
    AccuracyError if the quantization can't be repeated: another version of the scheme, other
    tokens, or another device or dtype, which changes learned values.
    """
    stored = checkpoint.scheme
    if stored.version != scheme.version:
        raise AccuracyError(
            f"the checkpoint is of version {stored.version} of {scheme.name}, here is "
            f"{scheme.version}"
        )
    calibration = None
    if scheme.needs_calibration:
        calibration = _calibration_of(checkpoint, original, text)
    return quantized_copy(
        original.model, scheme, calibration, seed=stored.seed, kv_bits=checkpoint.kv_bits
    )


def rounded_as_stored(
    checkpoint: QuantizedCheckpoint | None, formats: Mapping[str, NumberFormat], original: Any
) -> Any:
    """Round a copy of the original to nearest, in the formats of files of another tool.

    checkpoint: None: a GGUF file. formats: of LoadedModel, of what was read from them. No learned
    rounding should be worse. Scales that the folder has for activations and caches may be wrong:
    here they fit. Raises AccuracyError for a format that nothing is rounded to.
    """
    copied = copy.deepcopy(original)
    layers = () if checkpoint is None else checkpoint.layers
    for weight, number in formats.items():
        name = weight.removesuffix(".weight")
        if name not in layers:
            values = copied.get_submodule(name).weight.data
            values.copy_(_rounded(name, values, number).dequantize(torch.float32))
    if checkpoint is None:
        return copied
    for name in layers:
        dense = copied.get_submodule(name)
        stored = checkpoint.layer(name, dense.weight.device)
        number = formats.get(f"{name}.weight") or replace(stored.weight_format, clip=1.0)
        operand = _rounded(name, dense.weight.detach(), number)
        bias = None if dense.bias is None else dense.bias.detach().to(torch.float16)
        layer = QuantizedLayer(operand, _fitting(stored.activation), bias)
        replace_module(copied, name, FakeQuantizedLinear(name, layer))
    stored_scales = checkpoint.fp8_cache_scales_of_blocks()
    fitting = None if stored_scales is None else [torch.zeros_like(s) for s in stored_scales]
    quantize_cache(copied, checkpoint.kv_bits, fitting)
    return copied


def _rounded(name: str, values: torch.Tensor, number: NumberFormat) -> Operand:
    try:
        return quantize(values.float(), number)
    except (ShapeError, ValueError) as error:
        raise AccuracyError(f"{name} can't be rounded to {number.name}: {error}") from error


def _fitting(activation: ActivationQuantizer | None) -> ActivationQuantizer | None:
    """Return the same quantization of activations, with scales of the values themselves."""
    match activation:
        case StaticActivation():
            return DynamicActivation(of_all_tokens(activation.format))
        case DynamicActivation():
            return DynamicActivation(activation.format)
    return activation


def _calibration_of(
    checkpoint: QuantizedCheckpoint, original: LoadedModel, text: CalibrationPlan | None
) -> Calibration:
    """Return the calibration segments of a checkpoint."""
    learned = checkpoint.calibration
    if learned is None:
        raise AccuracyError(
            "the checkpoint does not say what it was calibrated with: quantize the model again"
        )
    if text is None:
        raise AccuracyError(
            "the checkpoint was calibrated: give the text that it was calibrated with by "
            "--calibration FILE"
        )
    device = device_kind(original.device)
    if learned.device != device:
        raise AccuracyError(
            f"the checkpoint was calibrated on {learned.device}, here is {device}, where a scheme "
            "may learn other values: evaluate it on such a device (--device)"
        )
    if learned.dtype != original.dtype:
        raise AccuracyError(
            f"the checkpoint was calibrated in {learned.dtype}, here is {original.dtype}, in which "
            f"a scheme learns other values: give --dtype {learned.dtype}"
        )
    tokens = tokenize(text.text, original.tokenizer)
    drawn = None
    with contextlib.suppress(QuantizeError):  # too short, so it is another text
        drawn = calibration_segments(
            tokens, segments=learned.segments, length=learned.length, seed=checkpoint.scheme.seed
        )
    if drawn is None or drawn.digest != learned.tokens:
        raise AccuracyError(
            f"the checkpoint was calibrated with another text than {text.text.name}: give that of "
            f"its {learned.segments} segments of {learned.length} tokens by --calibration FILE"
        )
    return drawn
