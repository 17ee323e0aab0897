"""Going through schemes and tasks of one model: quantize a copy, evaluate, compare, next."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexq_bench.accuracy.agreement import (
    AgreementMeter,
    ReferenceLogits,
    layer_errors,
    record_reference,
)
from flexq_bench.accuracy.as_decode import (
    DTYPE,
    ModelWeights,
    compute_as_decode,
    decoded_architecture,
)
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.kernel_linear import through_kernels
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import perplexity, segment_count, segments
from flexq_bench.accuracy.quantized_cache import quantize_cache
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KERNELS,
    PERPLEXITY,
    PERPLEXITY_VERSION,
    REFERENCE,
    MetricResult,
    Through,
    layer_result,
    perplexity_results,
    task_results,
)
from flexq_bench.accuracy.tasks import run_task, task_name
from flexq_bench.accuracy.texts import Text, tokenize
from flexq_bench.checkpoints import QuantizedCheckpoint
from flexq_bench.schemes.calibration import Calibration, calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import layer_kernels, resolve
from flexq_bench.schemes.scheme import Progress, Scheme
from flexq_bench.schemes.smoothing import Folds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """Segments of a text that calibrated schemes may look at. length None: the context."""

    text: Text
    segments: int = 128
    length: int | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Plan of an evaluation: schemes by name, on texts and on tasks of lm-eval.

    context None: GPTQ's 2048 tokens, or what the model has. max_tokens: see segment_count. limit:
    questions a task. batch: questions at once. layers: also each layer's own error, on the first
    segment of the first text. through: what computes quantized layers; None: kernels on a GPU, the
    reference on a CPU. checkpoint: a folder with what the last of the schemes made; None: schemes
    quantize in memory. original False: there is no model as it is, the checkpoint is all there is.
    """

    schemes: tuple[str, ...]
    texts: tuple[Text, ...] = ()
    tasks: tuple[str, ...] = ()
    task_data: Path | None = None
    context: int | None = None
    max_tokens: int | None = None
    limit: int | None = None
    batch: int = 8
    layers: bool = False
    calibration: CalibrationPlan | None = None
    seed: int = 0
    through: Through | None = None
    checkpoint: str | None = None
    original: bool = True
    units: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        """units: (scheme, task) in the order evaluated; the model as it is comes first.

        Raises AccuracyError if there is nothing to evaluate on, or a name stands for two things.
        """
        if self.checkpoint is not None and self.layers:
            raise AccuracyError(
                "--layers compares with what was folded into the model, which a checkpoint does "
                "not say: name its scheme with --schemes in place of the folder"
            )
        original = (FULL_PRECISION,) if self.original else ()
        schemes = dict.fromkeys((*original, *self.schemes))
        names = [*(text.name for text in self.texts), *self.tasks]
        called = [*(text.name for text in self.texts), *map(task_name, self.tasks)]
        twice = next((name for name in called if called.count(name) > 1), None)
        if twice is not None:
            raise AccuracyError(f"two of the texts and tasks are called {twice}: write NAME=PATH")
        if not names:
            raise AccuracyError("evaluate on what? Give --data FILE, --tasks NAMES, or both")
        object.__setattr__(self, "units", tuple((s, name) for s in schemes for name in names))

    @property
    def quantized(self) -> tuple[str, ...]:
        """The schemes that quantize, each once."""
        return tuple(dict.fromkeys(name for name in self.schemes if name != FULL_PRECISION))


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A model under a scheme. folds: what was folded into it; of a checkpoint none is known."""

    scheme: str
    model: LoadedModel
    folds: Folds


class Evaluator:
    """Evaluates one unit after another; a scheme's model is made when its first unit needs it."""

    def __init__(
        self, loaded: LoadedModel, plan: EvaluationPlan, checkpoint: QuantizedCheckpoint | None
    ) -> None:
        """loaded: the original model; where the plan has none, the checkpoint's.

        on_block, which may be set, is called for each block that is quantized.

        Raises UsageError if a scheme can't be used on this model, or a text is too short.
        """
        self._loaded = loaded
        self._plan = plan
        self._checkpoint = checkpoint
        self.through = plan.through or default_through(loaded.device)
        self.on_block: Progress | None = None
        self._texts = {text.name: text for text in plan.texts}
        self._tokens = {text.name: tokenize(text, loaded.tokenizer) for text in plan.texts}
        self._references: dict[str, ReferenceLogits] = {}
        self._current: _Quantized | None = None
        self.context = loaded.context(plan.context)
        for tokens in self._tokens.values():
            segment_count(tokens.numel(), self.context, plan.max_tokens)
        in_memory = [name for name in plan.quantized if not self._is_stored(name)]
        self._schemes = {name: resolve(name) for name in in_memory}
        if self._schemes:
            layout = map_model(loaded.model)
            if self.through == KERNELS:
                for scheme in self._schemes.values():
                    _check_kernels(scheme, gated=layout.names.gated)
        needing = [name for name, scheme in self._schemes.items() if scheme.needs_calibration]
        self._calibration = self._calibrate(needing)

    def evaluate(self, scheme: str, task: str) -> list[MetricResult]:
        """The results of one unit of the plan; a metric that can't be computed is one, too.

        Raises UsageError if the scheme or the task can't be used as asked.
        """
        try:
            model = self.model_under(scheme)
            if task in self._texts:
                return self._on_text(scheme, model, self._texts[task])
            result = run_task(
                model,
                task,
                data=self._plan.task_data,
                limit=self._plan.limit,
                batch=self._plan.batch,
                seed=self._plan.seed,
            )
            return task_results(scheme, result, self.parameters(scheme, task))
        except RuntimeError as error:  # torch's own: out of memory, a kernel that failed
            log.warning("%s on %s failed: %s", scheme, task, error)
            return [self._failed(scheme, task, error)]

    def model_under(self, scheme: str) -> LoadedModel:
        """The model as it is, the checkpoint's, or a copy that the scheme has quantized.

        One quantized model at a time. Raises UsageError if the scheme can't quantize it, the
        checkpoint is damaged, or a layer has no kernel and is to be computed by one.
        """
        if scheme == FULL_PRECISION or not self._plan.original:
            return self._loaded
        return self._quantized(scheme).model

    def _quantized(self, scheme: str) -> _Quantized:
        if self._current is None or self._current.scheme != scheme:
            self._current = None  # the last scheme's copy goes before the next one is made
            if self._checkpoint is not None and self._is_stored(scheme):
                loaded = load_checkpoint(
                    self._checkpoint,
                    device=self._loaded.device,
                    through=self.through,
                    dtype=self._loaded.dtype,
                )
                self._current = _Quantized(scheme, loaded, Folds())
            else:
                self._current = self._quantized_copy(scheme)
        return self._current

    def _quantized_copy(self, scheme: str) -> _Quantized:
        copied = copy.deepcopy(self._loaded.model)
        used = self._schemes[scheme]
        folds = used.quantize(
            copied, self._calibration, seed=self._plan.seed, progress=self.on_block
        )
        if self.through == REFERENCE or not self._computed_as_decode(copied, used.kv_bits):
            quantize_cache(copied, used.kv_bits)
        return _Quantized(scheme, dataclasses.replace(self._loaded, model=copied), folds)

    def _computed_as_decode(self, quantized: Any, kv_bits: int) -> bool:
        """Let kernels compute a quantized model; whether decode's forward pass does."""
        through_kernels(quantized)
        architecture = decoded_architecture(quantized)
        if architecture is None:
            return False
        return compute_as_decode(quantized, ModelWeights(architecture, quantized), kv_bits)

    def _is_stored(self, scheme: str) -> bool:
        """True of the scheme whose layers the checkpoint has."""
        return self._checkpoint is not None and scheme == self._plan.schemes[-1]

    def first_segment(self) -> torch.Tensor | None:
        """The first segment of the first text [context]; None: there is no text."""
        if not self._plan.texts:
            return None
        tokens = self._tokens[self._plan.texts[0].name]
        return next(segments(tokens, self.context))

    def parameters(self, scheme: str, task: str) -> dict[str, Any]:
        """Parameters that a unit's numbers depend on beside model, data and seed."""
        given: dict[str, Any] = {"dtype": self._loaded.dtype}
        if scheme != FULL_PRECISION:
            given["through"] = self.through
            if self.through == KERNELS and decoded_architecture(self._loaded.model) is not None:
                given["dtype"] = DTYPE
        if self._checkpoint is not None and self._is_stored(scheme):
            stored = self._checkpoint
            given |= {
                "scheme_version": stored.scheme.version,
                "options": stored.scheme.options,
                "content_hash": stored.content_hash,
            }
        used = self._schemes.get(scheme)
        if used is not None:
            given |= {"scheme_version": used.version, "options": dataclasses.asdict(used.options)}
            if used.needs_calibration and self._plan.calibration and self._calibration:
                given["calibration"] = {
                    "data_hash": self._plan.calibration.text.content_hash,
                    "segments": self._calibration.segments,
                    "length": self._calibration.length,
                }
        if task in self._texts:
            return {**given, "context": self.context, "max_tokens": self._plan.max_tokens}
        return {**given, "limit": self._plan.limit}

    def _on_text(self, scheme: str, model: LoadedModel, text: Text) -> list[MetricResult]:
        parameters = self.parameters(scheme, text.name)
        reference = self._reference(text) if self._plan.original else None
        if reference is not None and scheme == FULL_PRECISION:
            return perplexity_results(scheme, text, reference.result, None, parameters)
        meter = None if reference is None else AgreementMeter(reference)
        result = perplexity(
            model.model,
            self._tokens[text.name],
            context=self.context,
            max_tokens=self._plan.max_tokens,
            on_logits=meter,
        )
        agreement = None if meter is None else meter.result()
        results = perplexity_results(scheme, text, result, agreement, parameters)
        if self._plan.layers and text == self._plan.texts[0]:
            first = next(segments(self._tokens[text.name], self.context))
            folds = self._quantized(scheme).folds
            errors = layer_errors(self._loaded.model, model.model, first, folds)
            results.append(layer_result(scheme, text, errors, parameters))
        return results

    def _reference(self, text: Text) -> ReferenceLogits:
        if text.name not in self._references:
            self._references[text.name] = record_reference(
                self._loaded.model,
                self._tokens[text.name],
                context=self.context,
                max_tokens=self._plan.max_tokens,
            )
        return self._references[text.name]

    def _calibrate(self, needing: Sequence[str]) -> Calibration | None:
        plan = self._plan.calibration
        if not needing:
            return None
        if plan is None:
            raise AccuracyError(
                f"{', '.join(needing)}: calibration data are needed: give --calibration FILE, a "
                "text that is not evaluated on"
            )
        if any(plan.text.content_hash == text.content_hash for text in self._plan.texts):
            raise AccuracyError(
                f"{', '.join(needing)}: --calibration is a text of --data: calibrate on another one"
            )
        tokens = tokenize(plan.text, self._loaded.tokenizer)
        length = self._loaded.context(plan.length or self.context)
        return calibration_segments(
            tokens, segments=plan.segments, length=length, seed=self._plan.seed
        )

    def _failed(self, scheme: str, task: str, error: Exception) -> MetricResult:
        text = self._texts.get(task)
        return MetricResult(
            scheme=scheme,
            task=task_name(task),
            task_version=PERPLEXITY_VERSION if text else "",
            data_hash=text.content_hash if text else "",
            metric=PERPLEXITY if text else "acc",
            direction="lower" if text else "higher",
            value=None,
            standard_error=None,
            n_items=0,
            values=(),
            parameters=self.parameters(scheme, task),
            detail=" ".join(str(error).split())[:500],
        )


def default_through(device: torch.device) -> Through:
    """Kernels on a GPU, where they are fast; the reference on a CPU."""
    return KERNELS if device.type == "cuda" else REFERENCE


def _check_kernels(scheme: Scheme, *, gated: bool) -> None:
    """Raise QuantizeError if a layer of a scheme has no kernel, before anything is evaluated."""
    for layers in layer_kernels(scheme, gated=gated):
        if not layers.kernel:
            raise QuantizeError(
                f"{scheme.name}: {layers.kinds[0]}: {layers.reason}: evaluate --through reference"
            )
