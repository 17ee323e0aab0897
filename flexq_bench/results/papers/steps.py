"""Command lines of this program for what is left to measure of a published table or figure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexq_bench.kernels.registry import labels
from flexq_bench.results.papers.evidence import TASK_NAMES, ZERO_SHOT, Evidence, kv_bits_of
from flexq_bench.results.papers.statements import compared_cases
from flexq_bench.results.papers.tables import is_of_scores, shape_of
from flexq_bench.schemes.model_files import is_there, model_at
from flexq_bench.workloads.case import Case, parse_kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.published import Figure, Paper, PublishedTable
from flexq_bench.workloads.ranges import parse_ranges
from flexq_bench.workloads.suites import load_suite

_LOCAL_TASKS = (*ZERO_SHOT, "mmlu")
_ONLINE_TEXTS = ("wikitext2", "c4")
_TEXTS = ("wikitext2", "c4", "c4-new", "ptb", "ptb-new")
TEXT_NAMES = frozenset(name for text in _TEXTS for name in (text, *TASK_NAMES.get(text, ())))


@dataclass(frozen=True, slots=True)
class Step:
    """A command. suite: text of a suite file whose path is to be its last argument; empty: none."""

    arguments: tuple[str, ...]
    suite: str = ""


@dataclass(frozen=True, slots=True)
class AccuracyInputs:
    """A model's folder and texts, as options of `accuracy`; model empty: there is none.

    data: each NAME=[KIND:]PATH or a name of the hub, with a name of TEXT_NAMES.
    """

    model: str = ""
    data: tuple[str, ...] = ()
    task_data: str = ""
    max_tokens: int | None = None
    calibration: str = ""


def steps_of(
    paper: Paper,
    entry: PublishedTable | Figure,
    evidence: Evidence,
    gpu: str,
    inputs: AccuracyInputs | None = None,
) -> list[Step]:
    """Return the commands for what is not stored of a GPU, or of a model.

    gpu: empty: there is none, so only accuracy is left. Without inputs, accuracy is left out.
    """
    if isinstance(entry, PublishedTable) and is_of_scores(entry):
        return (
            [] if inputs is None or not inputs.model else _accuracy(paper, entry, evidence, inputs)
        )
    if not gpu:
        return []
    if entry.commands:
        return [step for text in entry.commands for step in _whole_model(text, evidence, gpu)]
    if isinstance(entry, Figure):
        cases = _figure(paper, entry, evidence, gpu)
    else:
        cases = _kernels(paper, entry, evidence, gpu)
    return [_run(f"{paper.key}/{entry.id}", cases)] if cases else []


def _kernels(paper: Paper, table: PublishedTable, evidence: Evidence, gpu: str) -> list[Case]:
    """Return the table's cases that are missing."""
    places = dict.fromkeys(
        (paper.kernel(cell), shape_of(table, cell)) for cell in table.cells() if table.suite
    )
    missing = [p for p in places if (gpu, p[0], table.cache, *p[1]) not in evidence.times]
    return [
        Case(kernel, GemmWorkload(*shape), variant, cache=table.cache)
        for (kernel, variant), shape in ((parse_kernel_label(p[0]), p[1]) for p in missing)
    ]


def _figure(paper: Paper, figure: Figure, evidence: Evidence, gpu: str) -> list[Case]:
    """Return the cases that are missing of those that statements compare by the figure's suite."""
    stated = [s for s in paper.statement if s.ours is not None and s.ours.suite == figure.suite]
    if not figure.suite or not stated:
        return []
    known = {r.case for r in evidence.results if r.gpu == gpu and r.median_us is not None}
    cases = load_suite(figure.suite).cases(labels("cuda"))
    wanted = set().union(*(compared_cases(statement, cases) for statement in stated))
    return [case for case in cases if case in wanted and case.key not in known]


def _run(name: str, cases: Sequence[Case]) -> Step:
    """Return a run of cases."""
    lines = [f'description = "what is missing of {name}"']
    by_place: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        by_place.setdefault((case.workload.key, case.cache), []).append(case)
    for (_, cache), group in by_place.items():
        kernels = ", ".join(f'"{case.label}"' for case in group)
        workload = group[0].workload
        if isinstance(workload, GemmWorkload):
            lines += ["[[group]]", f'm = "{workload.m}"', f'shapes = ["{workload.n}x{workload.k}"]']
        else:
            values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in workload.values)
            lines += [
                "[[cases]]",
                f'operation = "{workload.operation}"',
                f"parameters = {{{values}}}",
            ]
        lines += [f"kernels = [{kernels}]", f'caches = ["{cache}"]']
    return Step(("run",), "\n".join(lines) + "\n")


def _whole_model(text: str, evidence: Evidence, gpu: str) -> Iterator[Step]:
    """Yield the command for its schemes that lack a result."""
    verb, model, *rest = shlex.split(text)
    is_served = "--serve" in rest
    rest = [word for word in rest if word != "--serve"]
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    schemes = options.pop("--scheme").split(",")
    if is_served:
        limits = parse_ranges(options["--batch-limit"])
        memory = options.get("--memory-gib")
        known = {
            (r.scheme, r.batch_limit)
            for r in evidence.servings
            if (r.gpu, r.model) == (gpu, model)
            and (r.memory_limit_bytes is None) == (memory is None)
        }
        left = [s for s in schemes if any((s, limit) not in known for limit in limits)]
    else:
        settings = [
            (batch, prompt, new)
            for batch in parse_ranges(options.get("--batch", "1"))
            for prompt in parse_ranges(options["--prompt"])
            for new in parse_ranges(options["--new"])
        ]
        decoded = {
            (r.scheme, r.batch, r.prompt_tokens, r.new_tokens)
            for r in evidence.decodes
            if (r.gpu, r.model, r.kv_bits) == (gpu, model, kv_bits_of(r.scheme))
        }
        left = [s for s in schemes if any((s, *setting) not in decoded for setting in settings)]
    if left:
        others = [word for pair in options.items() for word in pair]
        served = ["--serve"] if is_served else []
        yield Step((verb, model, *served, "--scheme", ",".join(left), *others))


def _accuracy(
    paper: Paper, table: PublishedTable, evidence: Evidence, inputs: AccuracyInputs
) -> list[Step]:
    """Return the evaluation of the table's schemes that lack a result of this model."""
    cells = list(table.cells())
    tasks = list(dict.fromkeys(str(cell.at.get("task", "")) for cell in cells))
    texts = [task for task in tasks if task in _TEXTS]
    asked = [TASK_NAMES.get(task, (task,))[0] for task in tasks if task not in (*_TEXTS, "mean")]
    asked = list(dict.fromkeys("mmlu" if name.startswith("mmlu") else name for name in asked))
    if inputs.task_data:
        asked = [name for name in asked if name in _LOCAL_TASKS]
    path = Path(inputs.model).expanduser()
    name = model_at(path).name if is_there(path) else path.name
    schemes = dict.fromkeys(scheme for cell in cells for scheme in paper.schemes_of(cell)[:1])
    given = {spec.partition("=")[0] for spec in inputs.data}
    named = [text for text in texts if given & {text, *TASK_NAMES.get(text, ())}]
    judged = [task for task in (*(named or texts), *asked) if task]
    metric = "perplexity" if texts else "accuracy"
    left = [s for s in schemes if any(evidence.score(name, s, t, metric) is None for t in judged)]
    if not left or not judged:
        return []
    data = inputs.data or tuple(text for text in texts if text in _ONLINE_TEXTS)
    protocol = paper.accuracy
    arguments = ["accuracy", "--model", inputs.model, "--through", "reference"]
    arguments += ["--schemes", ",".join(s for s in left if s != "fp16")]
    if texts:
        arguments += [word for text in data for word in ("--data", text)]
    if name in {paper.model(str(cell.at.get("model", ""))) for cell in cells}:
        arguments += ["--context", str(protocol.context), "--bos", protocol.bos]
    if asked:
        arguments += ["--tasks", ",".join(asked)]
        arguments += ["--task-data", inputs.task_data] if inputs.task_data else []
    if inputs.max_tokens is not None:
        arguments += ["--max-tokens", str(inputs.max_tokens)]
    if inputs.calibration:
        arguments += ["--calibration", inputs.calibration]
    return [Step(tuple(arguments))]


def why_not_here(paper: Paper, entry: PublishedTable | Figure, gpu: str, model: str) -> str:
    """Return why nothing can be run for it on this machine; empty: something can."""
    if isinstance(entry, PublishedTable):
        if entry.cannot:
            return entry.cannot
        if is_of_scores(entry):
            named = {paper.model(str(cell.at.get("model", ""))) for cell in entry.cells()} - {""}
            return (
                "" if model else f"it needs a model: --model FOLDER, of {', '.join(sorted(named))}"
            )
    elif not (entry.suite or entry.commands):
        return "a figure without numbers"
    return "" if gpu else "this machine has no GPU"


def named_figures(papers: Sequence[Paper]) -> list[tuple[Paper, Figure]]:
    """Return the figures that something here measures."""
    return [(p, figure) for p in papers for figure in p.figure if figure.suite or figure.commands]
