"""Options of the commands that evaluate or quantize a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.options import MAX_COUNT

if TYPE_CHECKING:
    from flexq_bench.accuracy.plan import CalibrationPlan
    from flexq_bench.accuracy.results import Through
    from flexq_bench.accuracy.texts import Text
    from flexq_bench.decode.checkpoint_cache import CalibrationText

# Panels of --help, which group the options.
model_option = partial(typer.Option, rich_help_panel="Model and texts")
calibration_option = partial(typer.Option, rich_help_panel="Calibration")

ModelOption = Annotated[
    str,
    model_option(
        "--model",
        metavar="MODEL",
        help="A folder with config.json and safetensors, a .gguf file, or owner/name on the "
        "Hugging Face hub.",
    ),
]
DtypeOption = Annotated[
    str | None,
    model_option(
        "--dtype",
        metavar="NAME",
        help="float16, bfloat16 or float32. Default: float16 on a GPU, float32 on a CPU.",
    ),
]
SchemesFromOption = Annotated[
    list[str] | None,
    model_option(
        "--schemes-from",
        metavar="FILE",
        help="A Python file that registers your own schemes; may be repeated.",
    ),
]


@dataclass(frozen=True)
class EvaluatedModelOptions:
    """A model, how it is evaluated, and on which texts and tasks."""

    model: ModelOption
    schemes_from: SchemesFromOption = None
    checkpoint: Annotated[
        str | None,
        model_option(
            metavar="FOLDER",
            help="A quantized checkpoint of the model: evaluate exactly its bytes, compared with "
            "the original in --model.",
        ),
    ] = None
    through: Annotated[
        str | None,
        model_option(
            metavar="WHAT",
            help="Implementation of quantized layers: reference (dequantized weights, in torch) or "
            "kernels (the registry's). Default: kernels on a GPU, reference on a CPU.",
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        model_option(
            metavar="[NAME=][KIND:]PATH",
            help="A text for the perplexity; may be repeated. KIND: wikitext (.raw), c4 (.jsonl), "
            "ptb, c4-gptq, ptb-gptq or text. Online also wikitext2 and c4. shipped:code, and other "
            "strata: a text of the package.",
        ),
    ] = None
    task_data: Annotated[
        str | None,
        model_option(metavar="DIR", help="A folder with the tasks' data, for offline machines."),
    ] = None
    batch: Annotated[
        int,
        model_option(min=1, max=MAX_COUNT, help="Number of questions per batch."),
    ] = 8
    dtype: DtypeOption = None

    def texts(self) -> tuple[Text, ...]:
        """Read the texts of --data, or of the package. Raises AccuracyError."""
        from flexq_bench.accuracy.strata import as_text

        return tuple(as_text(spec) for spec in self.data or ())

    @property
    def task_folder(self) -> Path | None:
        return None if self.task_data is None else Path(self.task_data)

    def implementation(self) -> Through | None:
        """Return the implementation of quantized layers. Raises AccuracyError."""
        from flexq_bench.accuracy.results import as_through

        return as_through(self.through)


@dataclass(frozen=True)
class SegmentOptions:
    """Segments of the evaluated texts."""

    context: Annotated[
        int | None,
        model_option(
            min=2,
            max=MAX_COUNT,
            help="Tokens of a segment. Default: 2048, or the model's context if shorter.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        model_option(min=1, max=MAX_COUNT, help="Maximum number of predicted tokens of each text."),
    ] = None


SegmentCountOption = Annotated[
    int,
    calibration_option(
        "--calibration-segments", min=1, max=MAX_COUNT, help="Number of calibration segments."
    ),
]


@dataclass(frozen=True)
class CalibrationOptions:
    """The text that schemes are calibrated on."""

    calibration: Annotated[
        str | None,
        calibration_option(
            metavar="[KIND:]PATH",
            help="A text to calibrate schemes on, different from the evaluated texts.",
        ),
    ] = None
    calibration_segments: SegmentCountOption = 128
    calibration_length: Annotated[
        int | None,
        calibration_option(
            min=2, max=MAX_COUNT, help="Tokens of each calibration segment. Default: the context."
        ),
    ] = None

    def plan(self) -> CalibrationPlan | None:
        """Read the text; None: not given. Raises AccuracyError."""
        from flexq_bench.accuracy.plan import CalibrationPlan
        from flexq_bench.accuracy.texts import read_text

        if self.calibration is None:
            return None
        text = read_text(self.calibration)
        return CalibrationPlan(text, self.calibration_segments, self.calibration_length)

    def text(self) -> CalibrationText | None:
        """Return the text as `plan` does, by its path."""
        from flexq_bench.decode.checkpoint_cache import CalibrationText

        plan = self.plan()
        if plan is None or self.calibration is None:
            return None
        return CalibrationText(self.calibration, plan.segments, plan.length)


def use_own_schemes(files: list[str] | None) -> None:
    """Register the schemes of the files of --schemes-from.

    Raises QuantizeError if a file is missing, fails, or has no scheme.
    """
    if files:
        from flexq_bench.schemes.registry import add_schemes_from

        for file in files:
            add_schemes_from(file)
