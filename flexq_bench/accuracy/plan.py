"""Plan of an evaluation: schemes, texts, tasks, and limits of their size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.results import FULL_PRECISION, ORIGINAL, Bos, Through
from flexq_bench.accuracy.tasks import task_name
from flexq_bench.accuracy.texts import Text


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """Segments of a text for calibrated schemes. length None: the context."""

    text: Text
    segments: int = 128
    length: int | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Plan of an evaluation: schemes by name, on texts and on tasks of lm-eval.

    context None: GPTQ's 2048 tokens, limited by the model. max_tokens: see segment_count. limit:
    questions per task. batch: questions evaluated together. chat_template, few_shot: see run_task.
    layers: also evaluate the error of each layer, on the first segment of the first text. through:
    implementation of quantized layers; None: kernels on a GPU, the reference on a CPU. checkpoint:
    a folder with the result of the last scheme; None: schemes quantize in memory. original False:
    there is only the checkpoint, without the original model. bos: see chosen_bos. reference: a
    model, or a file of store_reference, with which all are compared; None: the original model.
    """

    schemes: tuple[str, ...]
    texts: tuple[Text, ...] = ()
    tasks: tuple[str, ...] = ()
    task_data: Path | None = None
    context: int | None = None
    max_tokens: int | None = None
    limit: int | None = None
    batch: int = 8
    chat_template: bool = False
    few_shot: int | None = None
    layers: bool = False
    calibration: CalibrationPlan | None = None
    seed: int = 0
    through: Through | None = None
    checkpoint: str | None = None
    original: bool = True
    bos: Bos | None = None
    reference: str | None = None
    units: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        """units: (scheme, task) in the order of evaluation; the original model comes first.

        Raises AccuracyError if there is no text or task, or if a name has two meanings.
        """
        if self.checkpoint is not None and self.layers:
            raise AccuracyError(
                "--layers compares with what was folded into the model, which a checkpoint does "
                "not say: name its scheme with --schemes in place of the folder"
            )
        compared = () if self.reference is None else (ORIGINAL,)
        original = (FULL_PRECISION,) if self.original else ()
        schemes = dict.fromkeys((*compared, *original, *self.schemes))
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
        """Return the distinct schemes that quantize."""
        as_it_is = (FULL_PRECISION, ORIGINAL)
        return tuple(dict.fromkeys(name for name in self.schemes if name not in as_it_is))
