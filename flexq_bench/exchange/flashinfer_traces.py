"""Trace sets of FlashInfer-Bench: import of their workloads and results, export of our results.

A trace set is a folder of `definitions/**/*.json`, `solutions/**/*.json`,
`workloads/**/*.jsonl` and `traces/**/*.jsonl`. The formats are those of the package
`flashinfer-bench` (github.com/flashinfer-ai/flashinfer-bench, flashinfer_bench/data).
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.db.exchange import replacing
from flexq_bench.db.identity import name_uuid
from flexq_bench.db.records import LINEAR, Record
from flexq_bench.errors import UsageError
from flexq_bench.exchange.exports.selection import comparable, label_of
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    MAX_RESULTS,
    BadResult,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    iso_time,
    number,
)
from flexq_bench.exchange.flashinfer_definitions import TraceDefinition, definition_of
from flexq_bench.exchange.flashinfer_operations import (
    REALS,
    definition_json,
    types_of,
    variable_axes,
)
from flexq_bench.runs.text_files import read_text
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.launches import Launch, LaunchTrace, Unmeasured, launch_trace
from flexq_bench.workloads.operation import OperationWorkload, format_values, parse_values
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import Backend, KernelSpec
    from flexq_bench.kernels.formats.number_format import NumberFormat

WHAT = "a folder of a FlashInfer-Bench trace set"
_OP_TYPE = "gemm"
_US_A_MS = 1e3
_MAX_FILES = 10_000
_MAX_NAME_CHARS = 200
_REFERENCE = """import torch


def _values(codes, scales):
    group = codes.shape[1] // scales.shape[1]
    return codes.to(torch.float64) * scales.to(torch.float64).repeat_interleave(group, dim=1)


def run({arguments}):
    return ({a} @ {b}.T).to(torch.{dtype})
"""


def read_traces(folder: str) -> Reading:
    """Read the times of a trace set's solutions, by solution, definition, axes and hardware.

    Operations are ours where the definition is of one of them (`OPERATIONS`), else the definition's
    type with its axes. Several workloads of the same axes are samples. A trace that did not pass
    becomes a failed result with its status. Raises UsageError for a folder that is no trace set.
    """
    definitions = read_definitions(folder)
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    newest: str | None = None
    bad: list[tuple[str, Callable[[], ExternalResult | None]]] = []
    for place, trace in _json_lines(folder, "traces"):
        try:
            definition = trace["definition"]
            if definition not in definitions:
                bad.append((place, _no_definition))
                continue
            evaluation = trace["evaluation"]
            axes = json.dumps(trace["workload"]["axes"], sort_keys=True)
            hardware = evaluation["environment"]["hardware"]
            key = (str(trace["solution"]), str(definition), axes, str(hardware))
        except (KeyError, TypeError):
            bad.append((place, _no_trace))
            continue
        groups.setdefault(key, []).append(evaluation)
        newest = max(filter(None, (newest, iso_time(evaluation.get("timestamp")))), default=None)
    entries = [
        (f"{key[0]} of {key[1]} {key[2]}", partial(_result, key, evaluations, definitions[key[1]]))
        for key, evaluations in groups.items()
    ]
    return collect([*bad, *entries], created_at=newest)


def read_launches(folder: str) -> LaunchTrace:
    """Read a trace set's workloads; each line is a call. Raises UsageError if it is none.

    folder: of the trace set, or one of its files of workloads.
    """
    path = Path(folder)
    chosen = path if path.is_file() else None
    root = folder
    if chosen is not None:
        above = (place for place in path.parents if (place / "definitions").is_dir())
        root = str(next(above, path.parent))
    definitions = read_definitions(root)
    counts: Counter[tuple[GemmWorkload | OperationWorkload, str]] = Counter()
    rest: Counter[tuple[str, str]] = Counter()
    for _, trace in _json_lines(root, "workloads", chosen):
        name = str(trace.get("definition"))[:_MAX_NAME_CHARS]
        definition = definitions.get(name)
        try:
            if definition is None or not definition.is_ours:
                raise BadResult("no operation of ours" if definition else "no definition")
            counts[definition.workload(trace["workload"]["axes"]), name] += 1
        except BadResult as error:
            rest[name, str(error)] += 1
        except (KeyError, TypeError, AttributeError):
            rest[name, "no workload"] += 1
    launches: dict[GemmWorkload | OperationWorkload, Launch] = {}
    for (workload, name), count in counts.items():  # several definitions may have one shape
        same = launches.get(workload)
        known = Launch(workload, name, 0) if same is None else same
        launches[workload] = replace(known, count=known.count + count)
    return launch_trace(launches.values(), [Unmeasured(*key, count) for key, count in rest.items()])


def workloads_of(folder: str) -> list[GemmWorkload | OperationWorkload]:
    """Return a trace set's workloads of our operations, sorted by shape. Raises UsageError."""
    workloads = (launch.workload for launch in read_launches(folder).launches)
    return sorted(
        workloads,
        key=lambda workload: (workload.operation != "linear", workload.operation, workload.values),
    )


def suite_text(folder: str, kernels: Sequence[str]) -> str:
    """Format a suite file of a trace set's workloads: these kernels on GEMMs, all on the others.

    Raises UsageError if it has no workload of an operation of ours.
    """
    workloads = workloads_of(folder)
    if not workloads:
        raise UsageError(f"{folder} has no workload of ours: name {WHAT} that has some")
    shapes: dict[tuple[int, int], list[int]] = {}
    for workload in workloads:
        if isinstance(workload, GemmWorkload):
            shapes.setdefault((workload.n, workload.k), []).append(workload.m)
    lines = [
        'description = "workloads of a FlashInfer-Bench trace set"',
        'source = "imported"',
    ]
    for (n, k), sizes in shapes.items():
        lines += [
            "",
            "[[group]]",
            f"kernels = {json.dumps(list(kernels))}",
            f'shapes = ["{n}x{k}"]',
            f'm = "{",".join(map(str, sizes))}"',
        ]
    for workload in workloads:
        if isinstance(workload, OperationWorkload):
            values = (f"{name} = {json.dumps(value)}" for name, value in workload.values)
            lines += [
                "",
                "[[cases]]",
                f'operation = "{workload.operation}"',
                'kernels = ["*"]',
                f"parameters = {{{', '.join(values)}}}",
            ]
    return "\n".join([*lines, ""])


def read_definitions(folder: str) -> dict[str, TraceDefinition]:
    """Return the definitions of a trace set by name. Raises UsageError if it is none."""
    if not (Path(folder) / "definitions").is_dir():
        raise UsageError(f"{folder} has no folder definitions: name {WHAT}")
    definitions = {}
    for path in _files(folder, "definitions"):
        try:
            value = json.loads(read_text(str(path), WHAT, most_bytes=MAX_BYTES))
            definition = definition_of(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{path} is no definition: name {WHAT}") from None
        definitions[definition.name] = definition
    return definitions


def write_traces(folder: str | Path, records: Iterable[Record]) -> int:
    """Write our results as a trace set; returns the number of traces.

    A definition of a linear layer is N and K with the formats of both operands: int8 codes with
    FP16 scales, or FP16. Its operands are quantized, so only results of stage `gemm` are written,
    and of other operations `op`: measured with a cold cache, of kernels with symmetric integers or
    reals whose output was checked. A solution is a kernel's label. Times of the reference are not
    measured and written as 0. Raises ResultsFileError.
    """
    root = Path(folder)
    traces: dict[str, list[dict[str, Any]]] = {}
    workloads: dict[str, dict[str, dict[str, Any]]] = {}
    definitions: dict[str, dict[str, Any]] = {}
    for record in comparable(records):
        described = _described(record)
        if described is None:
            continue
        definition, axes = described
        name = definition["name"]
        definitions[name] = definition
        workload = _workload(definition, axes)
        workloads.setdefault(name, {})[workload["uuid"]] = workload
        traces.setdefault(name, []).append(_trace(name, workload, record))
    for name, definition in definitions.items():
        lines = [
            {"definition": name, "workload": workload} for workload in workloads[name].values()
        ]
        kind = definition["op_type"]
        _write(root / "definitions" / kind / f"{name}.json", [definition], indent=1)
        _write(root / "workloads" / kind / f"{name}.jsonl", lines)
        _write(root / "traces" / kind / f"{name}.jsonl", traces[name])
    return sum(map(len, traces.values()))


def _result(
    key: tuple[str, str, str, str],
    evaluations: Sequence[Mapping[str, Any]],
    definition: TraceDefinition,
) -> ExternalResult:
    solution, name, axes, hardware = key
    workload = definition.workload(json.loads(axes))
    place: dict[str, Any]
    if isinstance(workload, GemmWorkload):
        place = {"shape": (workload.m, workload.n, workload.k)}
    else:
        parameters = format_values(workload.values, " ")
        place = {"operation": workload.operation, "parameters": parameters}
    common: dict[str, Any] = {
        "name": solution,
        "variant": name,
        **place,
        "device": hardware,
        "environment": {"tool": "flashinfer-bench", "statistic": "median"},
    }
    failed = [evaluation for evaluation in evaluations if evaluation["status"] != "PASSED"]
    if failed:
        return ExternalResult(**common, median=None, detail=cleaned(failed[0]["status"]))
    times = tuple(
        number(evaluation["performance"]["latency_ms"], "latency_ms") * _US_A_MS
        for evaluation in evaluations
    )
    return ExternalResult(
        **common, median=statistics.median(times), samples=times, n_samples=len(times)
    )


def _no_definition() -> ExternalResult | None:
    raise BadResult("its definition is not among the definitions")


def _no_trace() -> ExternalResult | None:
    raise BadResult("it is no trace of a solution")


def _json_lines(folder: str, kind: str, chosen: Path | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each line's place and object from all files of a kind; {} if it is no JSON object.

    chosen: only this file.
    """
    lines = 0
    for path in _files(folder, kind) if chosen is None else [chosen]:
        for place, line in enumerate(
            read_text(str(path), WHAT, most_bytes=MAX_BYTES).splitlines(), start=1
        ):
            if not line.strip():
                continue
            lines += 1
            if lines > 10 * MAX_RESULTS:
                raise UsageError(f"{folder} has more than {10 * MAX_RESULTS:,} {kind}: split it")
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = {}
            yield f"{path.name}:{place}", value if isinstance(value, dict) else {}


def _files(folder: str, kind: str) -> list[Path]:
    suffix = ".json" if kind == "definitions" else ".jsonl"
    files = sorted(p for p in (Path(folder) / kind).rglob(f"*{suffix}") if p.is_file())
    if len(files) > _MAX_FILES:
        raise UsageError(f"{folder}/{kind} has more than {_MAX_FILES:,} files: split it")
    return files


def _described(record: Record) -> tuple[dict[str, Any], Mapping[str, int]] | None:
    """The definition and its variable axes; None: no definition can describe the result."""
    spec = _spec_of(record)
    if spec is None:
        return None
    if record.operation != LINEAR:
        try:
            workload = OperationWorkload(record.operation, parse_values(record.parameters))
            definition = definition_json(workload, spec)
        except WorkloadError:  # of an earlier version
            return None
        return None if definition is None else (definition, variable_axes(definition, workload))
    if record.m is None or record.n is None or record.k is None:
        return None
    formats = (spec.activation, spec.weight)
    divisible = all(record.k % (number.group or record.k) == 0 for number in formats)
    types = [of_number for number in formats if (of_number := types_of(number))]
    if not divisible or len(types) < len(formats):
        return None
    coded = [(number, *found) for number, found in zip(formats, types, strict=True)]
    return _definition(record.n, record.k, coded, REALS[spec.output]), {"M": record.m}


def _spec_of(record: Record) -> KernelSpec | None:
    """The kernel of a result that can be a trace; None: it can't, or has no such kernel."""
    from flexq_bench.kernels.errors import KernelError
    from flexq_bench.kernels.registry import resolve

    compared = record.max_rel_error is not None or record.exact is not None
    ours = not record.project and record.backend in ("cuda", "cpu")
    stage = "gemm" if record.operation == LINEAR else "op"
    exported = (record.stage, record.cache, record.metric) == (stage, "cold", "time")
    if not (compared and ours and exported) or is_probe(record.kernel):
        return None
    try:
        backend: Backend = "cpu" if record.backend == "cpu" else "cuda"
        spec = resolve(kernel_label(record.kernel, record.variant), backend).spec
    except KernelError:  # of an earlier version, or of a package that is not installed
        return None
    return spec if spec.version == record.kernel_version else None


def _definition(
    n: int, k: int, numbers: Sequence[tuple[NumberFormat, str, str]], output: str
) -> dict[str, Any]:
    """The definition of a linear layer. numbers: of activations and weights, with `types_of`."""
    (x, *_), (w, *_) = numbers
    axes: dict[str, Any] = {
        "M": {"type": "var", "description": "tokens"},
        "N": {"type": "const", "value": n, "description": "output features"},
        "K": {"type": "const", "value": k, "description": "input features"},
    }
    inputs: dict[str, Any] = {}
    values = []
    for name, rows, (of, dtype, scales) in zip("AB", "MN", numbers, strict=True):
        inputs[name] = {"shape": [rows, "K"], "dtype": dtype}
        values.append(f"{name}.to(torch.float64)")
        if scales:
            axis = f"{name}_groups"
            groups = k // (of.group or k)
            axes[axis] = {"type": "const", "value": groups, "description": f"groups of {name}"}
            inputs[f"{name}_scales"] = {"shape": [rows, axis], "dtype": scales}
            values[-1] = f"_values({name}, {name}_scales)"
    names = "_".join(fmt.name.replace("/", "g") for fmt in (w, x))
    return {
        "name": f"gemm_{names}_n{n}_k{k}",
        "op_type": _OP_TYPE,
        "axes": axes,
        "inputs": inputs,
        "outputs": {"C": {"shape": ["M", "N"], "dtype": output}},
        "reference": _REFERENCE.format(
            arguments=", ".join(inputs), a=values[0], b=values[1], dtype=output
        ),
        "description": f"C = A · B^T of {w.name} weights and {x.name} activations.",
    }


def _workload(definition: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, Any]:
    sizes = " ".join(map(str, axes.values()))
    return {
        "axes": dict(axes),
        "inputs": {name: {"type": "random"} for name in definition["inputs"]},
        "uuid": name_uuid(f"{definition['name']} {sizes}", kind="flashinfer traces"),
    }


def _trace(definition: str, workload: dict[str, Any], record: Record) -> dict[str, Any]:
    return {
        "definition": definition,
        "workload": workload,
        "solution": label_of(record),
        "evaluation": {
            "status": "PASSED",
            "environment": {"hardware": record.gpu, "libs": dict(record.environment)},
            "timestamp": record.created_at,
            "log": "",
            "correctness": {
                "max_relative_error": record.max_rel_error or 0.0,
                "max_absolute_error": "NaN",  # not measured
                "extra": {"exact": record.exact, "commit": record.commit.sha},
            },
            "performance": {
                "latency_ms": (record.median_us or 0.0) / _US_A_MS,
                "reference_latency_ms": 0.0,
                "speedup_factor": 0.0,
            },
        },
    }


def _write(path: Path, values: Sequence[Mapping[str, Any]], indent: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for value in values:
            file.write(json.dumps(value, indent=indent, ensure_ascii=False).encode() + b"\n")
