"""Options of the verbs that evaluate a model: the model, its texts and tasks, its calibration."""

from __future__ import annotations

from typing import Annotated

import typer

from flexq_bench.cli.options import LARGEST_COUNT

# Panels of --help, which group the options.
MODEL = "Model and texts"
CALIBRATION = "Calibration"

# Model and texts
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A folder with config.json and safetensors, a .gguf file, or owner/name on the "
        "Hugging Face hub.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ThroughOption = Annotated[
    str | None,
    typer.Option(
        "--through",
        metavar="WHAT",
        help="Implementation of quantized layers: reference (dequantized weights, in torch) or "
        "kernels (the registry's). Default: kernels on a GPU, reference on a CPU.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="A quantized checkpoint of the model: evaluate exactly its bytes, compared with the "
        "original in --model.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="float16, bfloat16 or float32. Default: float16 on a GPU, float32 on a CPU.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[NAME=][KIND:]PATH",
        help="A text for the perplexity; may be repeated. KIND: wikitext (.raw), c4 (.jsonl), "
        "ptb, c4-gptq, ptb-gptq or text. Online also wikitext2 and c4.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAMES",
        help="Tasks of lm-eval, by name or .yaml file; zero-shot: the six tasks of the papers.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TaskDataOption = Annotated[
    str | None,
    typer.Option(
        "--task-data",
        metavar="DIR",
        help="A folder with the tasks' data, for offline machines.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=2,
        max=LARGEST_COUNT,
        help="Tokens of a segment. Default: 2048, or the model's context if shorter.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        max=LARGEST_COUNT,
        help="Maximum number of predicted tokens of each text.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
BosOption = Annotated[
    str | None,
    typer.Option(
        "--bos",
        metavar="WHERE",
        help="Position of the BOS token: segment (before each segment), text (only before the "
        "first one, as GPTQ's code), none. Default: before each segment, if the "
        "tokenizer adds one.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
SchemesFromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--schemes-from",
        metavar="FILE",
        help="A Python file that registers your own schemes; may be repeated.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        max=LARGEST_COUNT,
        help="Maximum number of questions of each task.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ChatTemplateOption = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        help="Format questions as a user's turn by the tokenizer's chat template, for instruct "
        "models.",
        rich_help_panel=MODEL,
    ),
]
FewShotOption = Annotated[
    int | None,
    typer.Option(
        "--few-shot",
        min=0,
        max=LARGEST_COUNT,
        help="Examples before each question. Default: the task's own number.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
BatchOption = Annotated[
    int,
    typer.Option(
        "--batch",
        min=1,
        max=LARGEST_COUNT,
        help="Number of questions per batch.",
        rich_help_panel=MODEL,
    ),
]

# Calibration
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="[KIND:]PATH",
        help="A text to calibrate schemes on, different from the evaluated texts.",
        show_default=False,
        rich_help_panel=CALIBRATION,
    ),
]
SegmentsOption = Annotated[
    int,
    typer.Option(
        "--calibration-segments",
        min=1,
        max=LARGEST_COUNT,
        help="Number of calibration segments.",
        rich_help_panel=CALIBRATION,
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--calibration-length",
        min=2,
        max=LARGEST_COUNT,
        help="Tokens of each calibration segment. Default: the context.",
        show_default=False,
        rich_help_panel=CALIBRATION,
    ),
]


def use_own_schemes(files: list[str] | None) -> None:
    """Register the schemes of the files of --schemes-from.

    Raises QuantizeError if a file is missing, fails, or has no scheme.
    """
    if files:
        from flexq_bench.schemes.registry import add_schemes_from

        for file in files:
            add_schemes_from(file)
