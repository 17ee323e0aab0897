"""llama-bench, of llama.cpp: its output as json, jsonl, csv, md or sql.

The tool (github.com/ggml-org/llama.cpp, tools/llama-bench) writes a row per test: settings, the
numbers of prompt and generated tokens, and tokens per second with their deviation. A table of md
has only the settings that differ from defaults, and `t/s` as `5765.41 ± 20.55`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect_each,
    console_text,
    count,
    iso_time,
    number,
    objects_with,
    of_samples,
    read_objects,
)

_WHAT = "the output of llama-bench as json, jsonl, csv, md or sql"
_INSERT = re.compile(r"INSERT INTO \w+ \(([\w, ]+)\) VALUES \((.*)\);")
KEYS = ("model_type", "avg_ts")
_SETTINGS = (
    "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "split_mode",
    "no_kv_offload", "flash_attn", "tensor_split", "use_mmap", "embeddings", "backends",
)  # fmt: skip
# Settings that are named if they differ from their default.
_RARE = {
    "n_cpu_moe": "0", "main_gpu": "0", "devices": "auto", "tensor_buft_overrides": "none",
    "load_mode": "auto", "lazy_mode": "auto", "no_op_offload": "0", "no_host": "False",
    "cpu_mask": "0x0", "cpu_strict": "False", "poll": "50", "repack": "True",
}  # fmt: skip
_FLAGS = ("no_kv_offload", "use_mmap", "embeddings", "no_host", "cpu_strict", "repack")
_SPREAD = re.compile(r"([\d.]+)(?:\s*±\s*([\d.]+))?")
_TABLE_NAMES = ("model", "test", "t/s", "size", "params")
_BUILD = re.compile(r"build: ([0-9a-f]{7,40}) \(\d+\)")


def read(path: str) -> Reading:
    """Read tokens per second by model, test and settings; the build's commit is the file's.

    Raises UsageError if the file is of another format.
    """
    text = console_text(path, _WHAT)
    if text.lstrip()[:1] in ("[", "{"):
        rows = read_objects(path, _WHAT)
    elif inserts := _INSERT.findall(text):
        rows = [dict(zip(*map(_sql_values, insert), strict=False)) for insert in inserts]
    elif text.startswith("|") or "\n|" in text:
        return _of_table(path, text)
    else:
        rows = list(csv.DictReader(io.StringIO(text, newline=None)))
    entries = objects_with(rows, KEYS, path, _WHAT)
    reading = collect_each(entries, _result, "row")
    builds = {str(row.get("build_commit")) for row in entries if isinstance(row, dict)}
    build = builds.pop() if len(builds) == 1 else ""
    return replace(reading, commit=build if re.fullmatch("[0-9a-f]{7,40}", build) else None)


def _sql_values(text: str) -> list[str]:
    return next(csv.reader([text], quotechar="'", skipinitialspace=True))


def _result(row: Mapping[str, Any]) -> ExternalResult:
    prompt, generated, depth = (
        count(row.get(f"n_{key}") or 0, key) for key in ("prompt", "gen", "depth")
    )
    kinds = [f"pp{prompt}"] * bool(prompt) + [f"tg{generated}"] * bool(generated)
    test = "+".join(kinds) + (f"@d{depth}" if depth else "")
    given = {name: _setting(name, value) for name, value in row.items() if value not in (None, "")}
    settings = [f"{name}={given[name]}" for name in _SETTINGS if name in given]
    settings += [f"{k}={given[k]}" for k, usual in _RARE.items() if given.get(k, usual) != usual]
    samples = tuple(number(value, "a sample") for value in row.get("samples_ts") or ())
    _, low, high = of_samples(samples) if len(samples) > 1 else (None, None, None)
    mean = number(row["avg_ts"], "avg_ts")
    return ExternalResult(
        name=str(row["model_type"]),
        variant=",".join([f"test={test}", *settings]),
        **by_unit(mean, "tokens/s", metric="throughput", higher=True),
        low=low if low is not None and low <= mean else None,
        high=high if high is not None and high >= mean else None,
        samples=samples,
        n_samples=len(samples),
        device=cleaned(row.get("gpu_info") or row.get("cpu_info") or ""),
        environment={"tool": "llama-bench", "build": cleaned(row.get("build_number", ""))},
        extra={"stddev": number(row.get("stddev_ts") or 0, "stddev_ts")},
        created_at=iso_time(row.get("test_time")),
    )


def _setting(name: str, value: object) -> str:
    """Return a flag as JSON has it; csv and sql have 0 and 1."""
    return {"0": "False", "1": "True"}.get(str(value), str(value)) if name in _FLAGS else str(value)


def _of_table(path: str, text: str) -> Reading:
    named: list[dict[str, str]] = []
    header: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not set(line) <= set("|-: "):
            named.append(dict(zip(header, cells, strict=False)))
        elif line.startswith("|"):  # the rule below the head of a table; there may be several
            header = above
            del named[-1:]
        above = cells
    if not {"model", "test", "t/s"} <= set(header):
        raise UsageError(f"{path} has no columns model, test and t/s: name {_WHAT}")
    reading = collect_each(named, _of_row, "row")
    build = _BUILD.search(text)
    return replace(reading, commit=build and build[1])


def _of_row(row: Mapping[str, str]) -> ExternalResult:
    spread = _SPREAD.fullmatch(row["t/s"])
    settings = [f"{name}={value}" for name, value in row.items() if name not in _TABLE_NAMES]
    return ExternalResult(
        name=row["model"],
        variant=",".join([f"test={row['test']}", *settings]),
        **by_unit(spread[1] if spread else row["t/s"], "tokens/s", metric="throughput"),
        environment={"tool": "llama-bench"},
        extra={"stddev": float(spread[2])} if spread and spread[2] else {},
    )
