"""`flexq-bench sensitivity`: perplexity increase per quantized layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from flexq_bench.cli.model_options import (
    CalibrationOptions,
    DtypeOption,
    ModelOption,
    SchemesFromOption,
    SegmentCountOption,
    SegmentOptions,
    use_own_schemes,
)
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import MAX_COUNT, DeviceOption, JsonFlag, SeedOption, finite
from flexq_bench.cli.output import console, plain, print_json, say
from flexq_bench.cli.progress import progress
from flexq_bench.errors import UsageError
from flexq_bench.packages import require_extra
from flexq_bench.runs.result_files import check_writable
from flexq_bench.sweeps.text import split_names
from flexq_bench.workloads.names import unknown

if TYPE_CHECKING:
    from flexq_bench.accuracy.perplexity import PerplexityResult
    from flexq_bench.accuracy.sensitivity.budget import BudgetReport, Choice
    from flexq_bench.accuracy.sensitivity.layer_kinds import Bits, KindSensitivity, OwnSetting
    from flexq_bench.accuracy.texts import Text
    from flexq_bench.schemes.layer_sensitivity import Cost

_BITS = re.compile(r"w([2-8]|16)a([2-8]|16)", re.IGNORECASE)
_TOP_SITES = 12  # rows of the table


@dataclass(frozen=True)
class FewCalibrationOptions(CalibrationOptions):
    """The text that layers are chosen on; fewer segments than quantization uses by default."""

    calibration_segments: SegmentCountOption = 16


@dataclass(frozen=True)
class TriedOptions:
    """Evaluated settings: bits of each kind of layer, and a budget of 8-bit activations."""

    bits: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Settings to evaluate for each kind of layer, or own schemes; none: skip this.",
        ),
    ] = "w6a6,w4a4"
    group: Annotated[
        int,
        typer.Option(min=1, max=MAX_COUNT, help="Values along K that share a scale."),
    ] = 128
    a8_budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=finite,
            help="Give 8-bit activations to this share of the layers, chosen on --calibration.",
        ),
    ] = None
    a8_cost: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Unit of the budget: layers (q, k and v are one), matrices, work."
        ),
    ] = "layers"

    def settings(self) -> tuple[Bits | OwnSetting, ...]:
        """Parse --bits. Raises UsageError."""
        from flexq_bench.accuracy.sensitivity.layer_kinds import Bits, OwnSetting
        from flexq_bench.schemes.own_schemes import own_schemes

        names = split_names(self.bits) or ()
        if names == ("none",):
            return ()
        settings: list[Bits | OwnSetting] = []
        for name in names:
            match = _BITS.fullmatch(name)
            if match is not None:
                settings.append(Bits(int(match[1]), int(match[2]), self.group))
            elif name in own_schemes():
                settings.append(OwnSetting(name))
        if len(settings) < len(names) or not names:
            raise UsageError(
                f"--bits {self.bits}: write w6a6 or w4a16, 2 to 8 bits or 16, an own scheme, "
                "or none"
            )
        return tuple(settings)

    def costs(self) -> tuple[Cost, ...]:
        """Parse --a8-cost. Raises UsageError."""
        from flexq_bench.schemes.layer_sensitivity import COSTS

        names = split_names(self.a8_cost) or ()
        for name in names:
            if name not in COSTS:
                raise UsageError(unknown("cost named", name, COSTS))
        return tuple(cost for cost in COSTS if cost in names)


@takes_option_groups
def sensitivity(
    *,
    model: ModelOption,
    data: Annotated[
        str,
        typer.Option(
            metavar="[KIND:]PATH",
            help="The text for the perplexity. KIND: wikitext (.raw), c4 (.jsonl), ptb, c4-gptq, "
            "ptb-gptq or text.",
        ),
    ],
    tried: TriedOptions,
    schemes_from: SchemesFromOption = None,
    calibrating: FewCalibrationOptions,
    segments: SegmentOptions,
    figure: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the result to a PNG file."),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Quantize one kind of layer at a time and show the perplexity increase.

    With --a8-budget also W6A6, W6A8, FlexQ's fixed choice, and FlexQ with 8-bit activations where
    they gain most. Exit code 2: an argument doesn't exist or doesn't fit.
    """
    require_extra("accuracy", "sensitivity", modules_of="models")

    from flexq_bench.accuracy.loading import load_model
    from flexq_bench.accuracy.sensitivity.budget import try_budget
    from flexq_bench.accuracy.sensitivity.layer_kinds import kind_sensitivities
    from flexq_bench.accuracy.setup import best_device
    from flexq_bench.accuracy.texts import read_text, tokenize
    from flexq_bench.measure.device import find_device
    from flexq_bench.schemes import FlexqOptions, calibration_segments

    use_own_schemes(schemes_from)
    settings, costs = tried.settings(), tried.costs()
    if tried.a8_budget is not None and calibrating.calibration is None:
        raise UsageError(
            "--a8-budget chooses layers on text: give --calibration FILE, not the text of --data"
        )
    if figure is not None:
        check_writable("--figure", figure)
        require_extra("plots", "sensitivity --figure")
    text = read_text(data)
    calibration = calibrating.plan()
    if calibration is not None and calibration.text.content_hash == text.content_hash:
        raise UsageError("--calibration is the text of --data: choose layers on another one")
    loaded = load_model(
        model, device=find_device(best_device() if device is None else device), dtype=dtype
    )
    tokens = tokenize(text, loaded.tokenizer)
    length = loaded.context(segments.context)
    report = None
    how: dict[str, Any] = {"context": length, "max_tokens": segments.max_tokens, "seed": seed}
    with progress("sensitivity") as bar:
        how["on_step"] = bar.update
        dense, kinds = kind_sensitivities(loaded.model, tokens, settings, **how)
        if tried.a8_budget is not None and calibration is not None:
            learned = calibration_segments(
                tokenize(calibration.text, loaded.tokenizer),
                segments=calibration.segments,
                length=loaded.context(calibration.length or length),
                seed=seed,
            )
            options = FlexqOptions(group=tried.group)
            budget = learned, tried.a8_budget, costs
            report = try_budget(loaded.model, tokens, *budget, options=options, **how)
    if figure is not None:
        from flexq_bench.accuracy.sensitivity.figure import write_figure

        title = f"{loaded.name} on {text.name}"
        write_figure(Path(figure), title, dense, kinds, report.sensitivities if report else ())
    if as_json:
        print_json(_document(loaded.name, loaded.content_hash, text, dense, kinds, report))
    else:
        _print(loaded.name, dense, kinds, report)
        if figure is not None:
            say(console(), f"figure: {figure}")


def _print(
    name: str,
    dense: PerplexityResult,
    kinds: Sequence[KindSensitivity],
    report: BudgetReport | None,
) -> None:
    out = console()
    say(out, f"{name}: perplexity {dense.perplexity:.4f} as it is, {dense.tokens:,} tokens")
    if kinds:
        out.print(_kinds_table(dense, kinds))
    if report is not None:
        out.print(_choices_table(report.choices))
        out.print(_sites_table(report))


def _kinds_table(dense: PerplexityResult, kinds: Sequence[KindSensitivity]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("quantized")
    settings = list(dict.fromkeys(sensitivity.bits for sensitivity in kinds))
    for setting in settings:
        for title in (setting.name, "increase", "95 % interval"):
            table.add_column(title, justify="right")
    for kind in dict.fromkeys(sensitivity.kind for sensitivity in kinds):
        cells = [kind]
        for setting in settings:
            measured = next(d for d in kinds if d.kind == kind and d.bits == setting)
            increase = measured.result.perplexity / dense.perplexity - 1
            cells += [f"{measured.result.perplexity:.3f}", f"{increase:+.2%}", _ends(measured)]
        table.add_row(*cells)
    return table


def _ends(sensitivity: KindSensitivity) -> str:
    if sensitivity.relative_ends is None:
        return "one segment"
    low, high = sensitivity.relative_ends
    return f"{low:+.2%} … {high:+.2%}"


def _choices_table(choices: Sequence[Choice]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("8-bit activations")
    titles = ("layers", "matrices", "work", "perplexity", "gap closed", "95 % interval", "expected")
    for title in titles:
        table.add_column(title, justify="right")
    for choice in choices:
        closed = choice.closed
        table.add_row(
            choice.name,
            *(f"{share:.1%}" for share in (choice.layers, choice.matrices, choice.work)),
            f"{choice.result.perplexity:.3f}",
            "" if closed is None else f"{closed.estimate:.1%}",
            "" if closed is None else f"{closed.low:.1%} … {closed.high:.1%}",
            f"{choice.predicted:.1%}",
        )
    return table


def _sites_table(report: BudgetReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gains most from 8 bits")
    table.add_column("nats a token", justify="right")
    table.add_column("of all", justify="right")
    total = sum(sensitivity.gain for sensitivity in report.sensitivities)
    for sensitivity in sorted(report.sensitivities, key=lambda sensitivity: -sensitivity.gain)[
        :_TOP_SITES
    ]:
        share = sensitivity.gain / total if total else 0.0
        table.add_row(sensitivity.site.name, f"{sensitivity.gain:.2e}", f"{share:.1%}")
    return table


def _document(
    name: str,
    content_hash: str,
    text: Text,
    dense: PerplexityResult,
    kinds: Sequence[KindSensitivity],
    report: BudgetReport | None,
) -> dict[str, Any]:
    return {
        "model": name,
        "model_hash": content_hash,
        "data": text.name,
        "data_hash": text.content_hash,
        "perplexity": dense.perplexity,
        "tokens": dense.tokens,
        "nll": dense.nll,
        "kinds": [
            {
                "kind": sensitivity.kind,
                **plain(sensitivity.bits),
                "perplexity": sensitivity.result.perplexity,
                "nll": sensitivity.result.nll,
                "increase": sensitivity.increase,
            }
            for sensitivity in kinds
        ],
        "sites": [
            {"name": d.site.name, "low": d.low, "high": d.high}
            for d in (report.sensitivities if report else ())
        ],
        "choices": [
            {**plain(choice), "perplexity": choice.result.perplexity}
            for choice in (report.choices if report else ())
        ],
    }
