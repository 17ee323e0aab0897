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
        help="What computes quantized layers: reference (dequantized weights, in torch) or kernels "
        "(the registry's). Default: kernels on a GPU, reference on a CPU.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="A quantized checkpoint of the model: exactly its bytes are evaluated, beside the "
        "original that --model names.",
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
        help="A text for the perplexity; may be given several times. KIND: wikitext (.raw), c4 "
        "(.jsonl), ptb or text. Online also wikitext2 and c4.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAMES",
        help="Tasks of lm-eval, by name or .yaml file; zero-shot: the six of the papers.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TaskDataOption = Annotated[
    str | None,
    typer.Option(
        "--task-data",
        metavar="DIR",
        help="A folder with the zero-shot tasks' data, for machines that are offline.",
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
        help="Tokens of a segment. Default: 2048, or what the model has.",
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
        help="Predict at most so many tokens of each text.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
BosOption = Annotated[
    str | None,
    typer.Option(
        "--bos",
        metavar="WHERE",
        help="Where the token that begins texts goes: segment (before each), text (before the first"
        " one, as GPTQ's code), none. Default: as the tokenizer asks, before each segment.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
SchemesFromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--schemes-from",
        metavar="FILE",
        help="A Python file that registers schemes of your own; may be given several times.",
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
        help="Only so many questions of each task.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ChatTemplateOption = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        help="Put questions as a user's turn by the tokenizer's chat template: instruct models.",
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
        "--batch", min=1, max=LARGEST_COUNT, help="Questions at once.", rich_help_panel=MODEL
    ),
]

# Calibration
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="[KIND:]PATH",
        help="A text to calibrate schemes on; not one that is evaluated on.",
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
        help="How many segments of it.",
        rich_help_panel=CALIBRATION,
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--calibration-length",
        min=2,
        max=LARGEST_COUNT,
        help="Tokens of each. Default: the context.",
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
