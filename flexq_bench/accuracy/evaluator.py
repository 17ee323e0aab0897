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
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import perplexity, segment_count, segments
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    PERPLEXITY,
    PERPLEXITY_VERSION,
    MetricResult,
    layer_result,
    perplexity_results,
    task_results,
)
from flexq_bench.accuracy.tasks import run_task, task_name
from flexq_bench.accuracy.texts import Text, tokenize
from flexq_bench.schemes.calibration import Calibration, calibration_segments
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.scheme import Progress
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
    segment of the first text.
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
    units: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        """units: (scheme, task) in the order evaluated; the model as it is comes first.

        Raises AccuracyError if there is nothing to evaluate on, or a name stands for two things.
        """
        schemes = dict.fromkeys((FULL_PRECISION, *self.schemes))
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


class Evaluator:
    """Evaluates one unit after another; a scheme's model is made when its first unit needs it."""

    def __init__(self, loaded: LoadedModel, plan: EvaluationPlan) -> None:
        """on_block, which may be set, is called for each block that is quantized.

        Raises UsageError if a scheme can't be used on this model, or a text is too short.
        """
        self._loaded = loaded
        self._plan = plan
        self.on_block: Progress | None = None
        self._texts = {text.name: text for text in plan.texts}
        self._tokens = {text.name: tokenize(text, loaded.tokenizer) for text in plan.texts}
        self._references: dict[str, ReferenceLogits] = {}
        self._current: tuple[str, LoadedModel, Folds] | None = None
        self.context = loaded.context(plan.context)
        for tokens in self._tokens.values():
            segment_count(tokens.numel(), self.context, plan.max_tokens)
        self._schemes = {name: resolve(name) for name in plan.quantized}
        if self._schemes:
            map_model(loaded.model)
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
        """The model as it is, or a copy that the scheme has quantized; one copy at a time.

        Raises UsageError if the scheme can't quantize it.
        """
        if scheme == FULL_PRECISION:
            return self._loaded
        if self._current is None or self._current[0] != scheme:
            self._current = None  # the last scheme's copy goes before the next one is made
            copied = copy.deepcopy(self._loaded.model)
            folds = self._schemes[scheme].quantize(
                copied, self._calibration, seed=self._plan.seed, progress=self.on_block
            )
            self._current = scheme, dataclasses.replace(self._loaded, model=copied), folds
        return self._current[1]

    def first_segment(self) -> torch.Tensor | None:
        """The first segment of the first text [context]; None: there is no text."""
        if not self._plan.texts:
            return None
        tokens = self._tokens[self._plan.texts[0].name]
        return next(segments(tokens, self.context))

    def parameters(self, scheme: str, task: str) -> dict[str, Any]:
        """Parameters that a unit's numbers depend on beside model, data and seed."""
        given: dict[str, Any] = {"dtype": self._loaded.dtype}
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
        reference = self._reference(text)
        if scheme == FULL_PRECISION:
            return perplexity_results(scheme, text, reference.result, None, parameters)
        meter = AgreementMeter(reference)
        result = perplexity(
            model.model,
            self._tokens[text.name],
            context=self.context,
            max_tokens=self._plan.max_tokens,
            on_logits=meter,
        )
        results = perplexity_results(scheme, text, result, meter.result(), parameters)
        if self._plan.layers and text == self._plan.texts[0]:
            first = next(segments(self._tokens[text.name], self.context))
            assert self._current is not None  # model_under made it
            errors = layer_errors(self._loaded.model, model.model, first, self._current[2])
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
