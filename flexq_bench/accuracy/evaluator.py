"""Evaluation of one model under several schemes: quantize a copy, evaluate it, compare."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from flexq_bench.accuracy.agreement import (
    Agreement,
    AgreementMeter,
    ReferenceLogits,
    layer_errors,
)
from flexq_bench.accuracy.as_decode import (
    DTYPE,
    ModelWeights,
    compute_as_decode,
    decoded_architecture,
)
from flexq_bench.accuracy.bos import TextTokens, chosen_bos, first_tokens_warning, text_tokens
from flexq_bench.accuracy.calibration_overlap import calibration_overlaps
from flexq_bench.accuracy.checkpoint_models import load_checkpoint
from flexq_bench.accuracy.coverage import TextCoverage, count_expert_tokens, text_coverage
from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import (
    PerplexityResult,
    perplexity,
    segments,
    text_length,
)
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.references import (
    ModelReference,
    ReferencePredictions,
    check_stored,
    segments_of,
)
from flexq_bench.accuracy.requantization import (
    RequantizedModel,
    as_checkpoint,
    quantized_copy,
    rounded_as_stored,
)
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KERNELS,
    KL,
    ORIGINAL,
    PERPLEXITY,
    PERPLEXITY_VERSION,
    REFERENCE,
    MetricResult,
    Through,
    layer_result,
    perplexity_results,
    task_results,
)
from flexq_bench.accuracy.stored_reference import StoredReference, store_reference
from flexq_bench.accuracy.strata import STRATA
from flexq_bench.accuracy.tasks import check_chat_template, run_task, task_name
from flexq_bench.accuracy.texts import Text, tokenize
from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.external.checkpoint import ExternalCheckpoint
from flexq_bench.decode.kernel_linear import through_kernels
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.errors import one_line
from flexq_bench.schemes.calibration import Calibration, calibration_segments
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.model_map import map_model
from flexq_bench.schemes.registry import layer_kernels, resolve
from flexq_bench.schemes.scheme import Progress, Scheme
from flexq_bench.schemes.smoothing import Folds
from flexq_bench.stats import distinct_blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A model under a scheme. folds: of the model; unknown for a checkpoint."""

    scheme: str
    model: LoadedModel
    folds: Folds


class Schedule(Protocol):
    """Rule that decides, during an evaluation, how many segments of a text are evaluated."""

    def next_count(
        self,
        scheme: str,
        text: str,
        base: Sequence[float],
        head: Sequence[float],
        so_far: Callable[[], Sequence[MetricResult]],
    ) -> int:
        """Return the number of segments to evaluate in total; no more than so far: enough.

        base, head: mean nats per token of the segments so far, under the reference and the scheme.
        so_far: computes the scheme's results on them.
        """
        ...


class Evaluator:
    """Evaluates one unit after another; a scheme's model is created when its first unit needs it.

    These attributes may be set: on_block, called for each quantized block; on_segment, called for
    each evaluated segment with scheme, text, segments so far and planned; schedule, which can end
    the evaluation of a text early (None: all of it is evaluated); at_once, the number of segments
    that a scheme's model computes together (None: see segments_at_once).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: EvaluationPlan,
        checkpoint: QuantizedCheckpoint | None,
        reference: ReferencePredictions | None = None,
    ) -> None:
        """loaded: the original model; if the plan has none, the checkpoint's. It is kept.

        reference: that of the plan; None: the original model, if the plan has it. Raises UsageError
        if a scheme can't be used on this model, or a text is too short.
        """
        self.loaded = loaded
        self._plan = plan
        self._checkpoint = checkpoint
        self.through = plan.through or default_through(loaded.device)
        self.on_block: Progress | None = None
        self.on_segment: Callable[[str, str, int, int], None] | None = None
        self.schedule: Schedule | None = None
        self.at_once: int | None = None
        self._agreements: dict[tuple[str, str], Agreement] = {}
        self._texts = {text.name: text for text in plan.texts}
        self.bos = chosen_bos(plan.bos, loaded.tokenizer)
        self.context = loaded.context(plan.context)
        self._tokens: dict[str, TextTokens] = {}
        self.unavailable: dict[str, str] = {}  # texts of STRATA that can't be evaluated, and why
        for text in plan.texts:
            try:
                tokens = text_tokens(text, loaded.tokenizer, self.bos, self.context)
                if isinstance(reference, StoredReference):
                    tokens = tokens.among_first(reference.segments(text))
                self._tokens[text.name] = tokens
                self._segment_count(text.name)  # raises AccuracyError for a text that is too short
            except AccuracyError as error:
                if text.name not in STRATA:
                    raise
                self._tokens.pop(text.name, None)
                self.unavailable[text.name] = str(error)
        self._current: _Quantized | None = None
        self._requantized: RequantizedModel | None = None
        self.reference = reference
        if reference is None and plan.original:
            self.reference = ModelReference(loaded, context=self.context, bos=plan.bos)
        known = None if self.reference is None else self.reference.model
        self.expert_tokens = {} if known is None else count_expert_tokens(known.model)
        in_memory = [name for name in plan.quantized if not self._is_stored(name)]
        self._schemes = {name: resolve(name) for name in in_memory}
        if self._schemes:
            map_model(loaded.model)
        needing = [name for name, scheme in self._schemes.items() if scheme.needs_calibration]
        self._calibration = self._calibrate(needing)
        self._overlaps = calibration_overlaps(
            *(", ".join(needing), self._calibration, checkpoint),
            [text for text in plan.texts if text.name not in self.unavailable],
            *(self._tokens, loaded),
        )

    def check_kernels(self) -> None:
        """Raise QuantizeError if kernels are requested and a layer of a scheme has none."""
        if self.through == KERNELS and self._schemes:
            gated = map_model(self.loaded.model).gated
            for scheme in self._schemes.values():
                _check_kernels(scheme, gated=gated)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings: about the model on the first text, and about calibration on a text."""
        if not self._tokens:
            return ()
        tokens = next(iter(self._tokens.values()))
        of_model = first_tokens_warning(self.loaded.model, self.loaded.tokenizer, tokens)
        return (*([of_model] if of_model else []), *map(str, self._overlaps))

    def save_reference(self, path: Path) -> str:
        """Store the unquantized model's predictions on the texts; returns the file's content hash.

        Raises AccuracyError as store_reference.
        """
        predictions = {
            text: (self._tokens[text.name], self._reference_on(text)) for text in self._plan.texts
        }
        return store_reference(path, self.loaded, predictions)

    def _reference_on(self, text: Text) -> ReferenceLogits:
        """Return the reference's predictions on the segments that suffice without a plan."""
        assert self.reference is not None  # the callers compare with it
        count = self.enough(text.name)
        return self.reference.predictions(text, self._tokens[text.name], count).first(count)

    def distinct_segments(self, text: str) -> tuple[tuple[int, ...], int]:
        """Return the indices of distinct segments, in order, and the number of all segments."""
        segments = self.text_ids(text).numpy()
        return tuple(int(index) for index in distinct_blocks(segments)), len(segments)

    def evaluate(self, scheme: str, task: str) -> list[MetricResult]:
        """Return the results of one unit of the plan, including metrics that can't be computed.

        Raises UsageError if the scheme or the task can't be used as requested.
        """
        try:
            if scheme == self._base and task in self._texts:
                return self._of_reference(scheme, self._texts[task])
            model = self.model_under(scheme)
            if task in self._texts:
                return self._on_text(scheme, model, self._texts[task])
            result = run_task(
                model,
                task,
                data=self._plan.task_data,
                limit=self._plan.limit,
                batch=self._plan.batch,
                chat_template=self._plan.chat_template,
                few_shot=self._plan.few_shot,
                seed=self._plan.seed,
            )
            return task_results(scheme, result, self.parameters(scheme, task))
        except RuntimeError as error:  # of torch: out of memory, a failed kernel
            log.warning("%s on %s failed: %s", scheme, task, error)
            return [self._failed(scheme, task, error)]

    def model_under(self, scheme: str) -> LoadedModel:
        """Return the original model, the checkpoint's, or a copy quantized by the scheme.

        Only one quantized model is in memory. Raises UsageError if the scheme can't quantize the
        model, kernels are requested and a layer has none, or as load_checkpoint and check_stored.
        """
        if scheme == ORIGINAL:
            if self.reference is None or self.reference.model is None:
                raise MissingTaskError(
                    "a stored reference has predictions on texts alone: give the original model "
                    "with --reference"
                )
            return self.reference.model
        if scheme == FULL_PRECISION or not self._plan.original:
            return self.loaded
        return self._quantized(scheme).model

    def _quantized(self, scheme: str) -> _Quantized:
        if self._current is None or self._current.scheme != scheme:
            # The last scheme's copies are freed before the next ones are created.
            self._current = self._requantized = None
            if self._checkpoint is not None and self._is_stored(scheme):
                loaded = load_checkpoint(
                    self._checkpoint,
                    device=self.loaded.device,
                    through=self.through,
                    dtype=self.loaded.dtype,
                )
                for name, tokens in self._tokens.items():
                    original, text = (self.loaded.name, tokens), self._texts[name]
                    check_stored(loaded, *original, text, self.context, self._plan.bos)
                self._current = _Quantized(scheme, loaded, Folds())
            else:
                self._current = self._quantized_copy(scheme)
        return self._current

    def _quantized_copy(self, scheme: str) -> _Quantized:
        copied = copy.deepcopy(self.loaded.model)
        used = self._schemes[scheme]
        folds = used.quantize(
            copied, self._calibration, seed=self._plan.seed, progress=self.on_block
        )
        if self.through == REFERENCE or not self._computed_as_decode(copied, used.kv_bits):
            quantize_cache(copied, used.kv_bits)
        return _Quantized(scheme, dataclasses.replace(self.loaded, model=copied), folds)

    def _computed_as_decode(self, quantized: Any, kv_bits: int) -> bool:
        """Let kernels compute a quantized model; returns True if decode's forward pass is used."""
        through_kernels(quantized)
        architecture = decoded_architecture(quantized)
        if architecture is None:
            return False
        return compute_as_decode(quantized, ModelWeights(architecture, quantized), kv_bits)

    def _is_stored(self, scheme: str) -> bool:
        """Return True if this is the scheme of the checkpoint's layers."""
        return self._checkpoint is not None and scheme == self._plan.schemes[-1]

    def reproduced(self, scheme: str, text_name: str, count: int) -> list[MetricResult]:
        """Quantize the original here, and evaluate it on at least `count` segments of a text.

        The reference computes the quantized layers, whatever the plan's setting. Segments of the
        last scheme and text are cached. For the unquantized model these are the original's own
        results. Raises UsageError if there is no original, or if its quantization can't be
        repeated.
        """
        text, tokens = self._texts[text_name], self._tokens[text_name]
        if self.reference is None:
            raise AccuracyError("there is no original: give it with --reference")
        reference = self.reference.predictions(text, tokens, count)
        parameters = self.parameters(FULL_PRECISION, text_name)
        if scheme == FULL_PRECISION and not self.is_bounded(scheme):
            result = reference.first(count).result
            results = perplexity_results(scheme, text, result, None, parameters)
            none = dataclasses.replace(results[0], metric=KL, value=0.0, values=(0.0,) * count)
            return [*results, none]
        if self.reference.model is None:
            raise AccuracyError("a stored reference can't be quantized: give the original model")
        model = self._requantized
        if model is None or model.scheme != scheme:
            self._requantized = model = None  # freed before the next one is created
            quantized = self._scheme_alone(scheme, self.reference.model)
        else:
            quantized = model.model
        if model is None or model.text != text_name:
            model = RequantizedModel(scheme, text_name, quantized, reference)
            self._requantized = model
        result = model.first(tokens, count, self.context_of(text_name))
        return perplexity_results(scheme, text, result, model.agreement(), parameters)

    def _scheme_alone(self, scheme: str, original: LoadedModel) -> Any:
        """Return a copy of the original that is quantized by a scheme, through the reference."""
        if self.is_bounded(scheme):
            formats = self.model_under(scheme).formats
            return rounded_as_stored(self._checkpoint, formats, original.model)
        used, plan = resolve(scheme), self._plan
        if self._checkpoint is not None and self._is_stored(scheme):
            return as_checkpoint(self._checkpoint, used, original, plan.calibration)
        return quantized_copy(
            original.model, used, self._calibration, seed=plan.seed, kv_bits=used.kv_bits
        )

    def is_bounded(self, scheme: str) -> bool:
        """Return True for a checkpoint of another tool, and a GGUF file that is itself judged.

        `reproduced` then rounds to nearest in its formats: a bound, not the same quantization.
        """
        if scheme == FULL_PRECISION:
            return self._plan.reference is not None and bool(self.loaded.formats)
        return self._is_stored(scheme) and isinstance(self._checkpoint, ExternalCheckpoint)

    def kv_bits(self, scheme: str) -> int:
        """Return the bits of keys and values in a scheme's KV cache."""
        if self._checkpoint is not None and self._is_stored(scheme):
            return self._checkpoint.kv_bits
        return resolve(scheme).kv_bits

    def folds(self, scheme: str) -> Folds:
        """Return the scales folded into a scheme's model; unknown for a checkpoint."""
        if scheme in (FULL_PRECISION, ORIGINAL) or not self._plan.original:
            return Folds()
        return self._quantized(scheme).folds

    def agreement(self, scheme: str, text: str) -> Agreement | None:
        """Return a scheme's last agreement with the reference on a text; None: not evaluated."""
        return self._agreements.get((scheme, text))

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the texts that can be evaluated."""
        return tuple(self._tokens)

    def text_ids(self, text: str) -> torch.Tensor:
        """Return the segments of a text that may be evaluated, int64 [segments, context]."""
        tokens, count = self._tokens[text], self._segment_count(text)
        return torch.stack(
            list(segments(tokens.ids, self.context_of(text), bos=tokens.bos))[:count]
        )

    def token_hash(self, text: str) -> str:
        """Return the SHA-256 of a text's token ids in the order of evaluation."""
        return hashlib.sha256(self.text_ids(text).numpy().tobytes()).hexdigest()

    def coverage(self, text: str, segments: int) -> TextCoverage:
        """Return the coverage of a text by its first `segments` in the order of evaluation."""
        return text_coverage(text, self._tokens[text], self.context_of(text), segments)

    def places(self, text: str) -> Sequence[int]:
        """Return each segment's number in the text, in the order of evaluation."""
        places = self._tokens[text].places
        return range(self._segment_count(text)) if places is None else places.tolist()

    def context_of(self, text: str) -> int:
        """Return the tokens of a segment of a text."""
        return self._texts[text].segment_tokens(self.context)

    def _segment_count(self, text: str) -> int:
        """Return the number of segments of a text that may be evaluated."""
        # Segments that cover seldom tokens are all needed.
        most = None if self._texts[text].parts else self._plan.max_tokens
        return segments_of(self._tokens[text], self.context_of(text), most)

    def enough(self, text: str) -> int:
        """Return the number of segments of a text that only a planned test may exceed."""
        count, known = self._segment_count(text), self._texts[text].segments
        return count if known is None else min(count, known)

    @property
    def _base(self) -> str:
        """The scheme whose results on texts are the reference's."""
        return FULL_PRECISION if self._plan.reference is None else ORIGINAL

    def parameters(self, scheme: str, task: str) -> dict[str, Any]:
        """Return the parameters that affect a unit's numbers, other than model, data and seed."""
        parameters: dict[str, Any] = {"dtype": self.loaded.dtype}
        if scheme == ORIGINAL and self.reference is not None:
            parameters["reference"] = self.reference.content_hash
        elif scheme != FULL_PRECISION:
            parameters["through"] = self.through
            if self.through == KERNELS and decoded_architecture(self.loaded.model) is not None:
                parameters["dtype"] = DTYPE
        if self._checkpoint is not None and self._is_stored(scheme):
            stored = self._checkpoint
            parameters |= {
                "scheme_version": stored.scheme.version,
                "options": stored.scheme.options,
                "content_hash": stored.content_hash,
            }
        used = self._schemes.get(scheme)
        if used is not None:
            parameters |= {
                "scheme_version": used.version,
                "options": dataclasses.asdict(used.options),
            }
            if used.needs_calibration and self._plan.calibration and self._calibration:
                parameters["calibration"] = {
                    "data_hash": self._plan.calibration.text.content_hash,
                    "segments": self._calibration.segments,
                    "length": self._calibration.length,
                }
        if task in self._texts:
            cut = {"context": self.context_of(task), "max_tokens": self._plan.max_tokens}
            seed = self._texts[task].seed
            sample = {} if seed is None else {"sample": seed}
            return {**parameters, **cut, **sample, "bos": self.bos}
        if self._plan.few_shot is not None:
            parameters["few_shot"] = self._plan.few_shot
        if self._plan.chat_template:
            parameters["chat_template"] = check_chat_template(self.loaded)
        return {**parameters, "limit": self._plan.limit}

    def _of_reference(self, scheme: str, text: Text) -> list[MetricResult]:
        """Return the reference's results on a text: those used for comparisons, if known."""
        assert self.reference is not None  # _base is a unit only if there is a reference
        known = self.reference.known(text) if self.schedule is not None else None
        if known is None:
            known = self._reference_on(text)
        return perplexity_results(
            scheme, text, known.result, None, self.parameters(scheme, text.name)
        )

    def _on_text(self, scheme: str, model: LoadedModel, text: Text) -> list[MetricResult]:
        parameters = self.parameters(scheme, text.name)
        tokens = self._tokens[text.name]
        available = self._segment_count(text.name)
        meter: AgreementMeter | None = None
        result: PerplexityResult | None = None
        while (done := 0 if result is None else len(result.nll)) < available:
            wanted = self._next_count(scheme, text, result, meter, available)
            if wanted <= done:
                break
            if self.reference is not None:
                reference = self.reference.predictions(text, tokens, wanted)
                _check_vocabulary(model, reference.head.layer)
                meter = meter or AgreementMeter(reference)
            more = self._computed(scheme, model, text, meter, (done, wanted))
            result = more if result is None else result.followed_by(more)
        assert result is not None  # segments_of is 1 at least
        agreement = None if meter is None else meter.result()
        if agreement is not None:
            self._agreements[scheme, text.name] = agreement
        results = perplexity_results(scheme, text, result, agreement, parameters)
        if self._plan.layers and text == self._plan.texts[0]:
            first, folds = self.text_ids(text.name)[0], self._quantized(scheme).folds
            errors = layer_errors(self.loaded.model, model.model, first, folds)
            results.append(layer_result(scheme, text, errors, parameters))
        return results

    def _computed(
        self,
        scheme: str,
        model: LoadedModel,
        text: Text,
        meter: AgreementMeter | None,
        counts: tuple[int, int],
    ) -> PerplexityResult:
        """Compute segments of a text, and compare them. counts: segments so far, and wanted."""
        tokens, context = self._tokens[text.name], self.context_of(text.name)
        length = text_length(context, tokens.bos)
        return perplexity(
            model.model,
            tokens.ids[counts[0] * length : counts[1] * length],
            context=context,
            on_logits=partial(self._on_logits, (scheme, text.name), meter, counts),
            at_once=self.at_once,
            bos=tokens.bos,
        )

    def _on_logits(
        self,
        unit: tuple[str, str],
        meter: AgreementMeter | None,
        counts: tuple[int, int],
        index: int,
        logits: torch.Tensor,
    ) -> None:
        """Compare the logits of a segment. counts: segments before this look, and planned."""
        if meter is not None:
            meter(index, logits)
        if self.on_segment is not None:
            self.on_segment(*unit, counts[0] + index + 1, counts[1])

    def _next_count(
        self,
        scheme: str,
        text: Text,
        result: PerplexityResult | None,
        meter: AgreementMeter | None,
        available: int,
    ) -> int:
        if self.schedule is None or self.reference is None:
            return self.enough(text.name)
        head = () if result is None else result.nll
        known = self.reference.known(text)
        base = () if known is None else known.result.nll[: len(head)]

        def so_far() -> list[MetricResult]:
            agreement = None if meter is None else meter.result()
            parameters = self.parameters(scheme, text.name)
            assert result is not None  # there are none before the first segment
            return perplexity_results(scheme, text, result, agreement, parameters)

        wanted = self.schedule.next_count(scheme, text.name, base, head, so_far)
        return min(available, max(1, wanted))

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
        tokens = tokenize(plan.text, self.loaded.tokenizer)
        length = self.loaded.context(plan.length or self.context)
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
            detail=one_line(error)[:500],
        )


def _check_vocabulary(model: LoadedModel, head: Any) -> None:
    """Raise AccuracyError if a model's vocabulary differs from that of its reference."""
    ours, theirs = (h.weight.shape[0] for h in (model.model.get_output_embeddings(), head))
    if ours != theirs:
        raise AccuracyError(
            f"{model.name} predicts one of {ours:,} tokens, its reference one of {theirs:,}: it is "
            "another model"
        )


def default_through(device: torch.device) -> Through:
    """Return the default: kernels on a GPU, where they are fast; the reference on a CPU."""
    return KERNELS if device.type == "cuda" else REFERENCE


def _check_kernels(scheme: Scheme, *, gated: bool) -> None:
    """Raise QuantizeError before the evaluation if a layer of a scheme has no kernel."""
    for layers in layer_kernels(scheme, gated=gated):
        if not layers.kernel:
            raise QuantizeError(
                f"{scheme.name}: {layers.kinds[0]}: {layers.reason}: evaluate --through reference"
            )
