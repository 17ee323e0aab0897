"""Databases as a fleet would leave them, made of records through the public doors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from db.engine import open_database
from db.exchange import import_file, write_records
from db.records import CommitInfo, DeviceInfo, Record, RunInfo
from db.store import begin_run

APP = Path(__file__).parents[2] / "dashboard" / "app.py"
COMMIT = CommitInfo("c0ffee" + "0" * 34, None, 7, dirty=False, subject="A change", author="Ada")
H200 = "NVIDIA H200"
SHAPES = (("llama-7b", "o_proj", 4096, 4096), ("llama-7b", "down_proj", 4096, 11008))
MEDIANS = {"cublaslt-w8a8": 12.0, "flexq-w6a6": 8.0}
STARTED = "2025-11-21T10:00:00+00:00"


def a_run(name: str = "run", **changes: Any) -> RunInfo:
    identity = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    run = RunInfo(identity, "paper-fig10", "manual", "complete", STARTED, identity)
    return replace(run, **changes)


def a_record(run: RunInfo | None = None, **changes: Any) -> Record:
    """A right result of flexq-w6a6 on an H200: 8 µs ±1 %, half as fast as the floor."""
    fields: dict[str, Any] = {
        "kernel": "flexq-w6a6",
        "variant": "",
        "stage": "gemm",
        "cache": "cold",
        "m": 1,
        "n": 4096,
        "k": 4096,
        "median_us": 8.0,
        "floor_us": 4.0,
        "backend": "cuda",
        "gpu": H200,
    } | changes
    label = fields["kernel"] + (f"[{fields['variant']}]" if fields["variant"] else "")
    case = (
        f"{label} {fields['stage']} {fields['cache']} m{fields['m']}n{fields['n']}k{fields['k']}"
    )
    run = run or a_run()
    median, floor = fields["median_us"], fields["floor_us"]
    defaults: dict[str, Any] = {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{run.uuid} {case} {fields['gpu']}")),
        "case": case,
        "kernel_version": 1,
        "metric": "time",
        "unit": "us",
        "direction": "lower",
        "weight_bits": 6,
        "act_bits": 6,
        "group": 128,
        "input_distribution": "normal-v1",
        "protocol_version": 1,
        "model": "llama-7b",
        "layer": "o_proj",
        "status": "ok",
        "detail": "",
        "ci_low_us": median and 0.99 * median,
        "ci_high_us": median and 1.01 * median,
        "n_samples": 50,
        "placement_medians_us": (),
        "samples_us": (),
        "pct_of_floor": median and floor and 100 * floor / median,
        "launch_us": 1.5,
        "tops": 5.5,
        "max_rel_error": 0.0,
        "exact": True,
        "accepted": True,
        "config": {},
        "binary_hash": None,
        "seed": 0,
        "sm_clock_mhz": None,
        "mem_clock_mhz": None,
        "power_w": None,
        "temperature_c": None,
        "throttle_mask": None,
        "n_invalid": 0,
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": COMMIT,
        "device": DeviceInfo(f"uuid of {fields['gpu']}", fields["gpu"], fields["backend"]),
        "environment": {"driver": "580.1"},
    }
    return Record(**defaults | fields)


def records_of(
    run: RunInfo | None = None, m: Sequence[int] = (1, 8), **changes: Any
) -> list[Record]:
    """Two kernels on two layers at each M; flexq is 1.5 times as fast as the baseline."""
    return [
        a_record(
            run, kernel=kernel, median_us=median, m=tokens, model=model, layer=layer, n=n, k=k,
            **changes,
        )
        for model, layer, n, k in SHAPES
        for tokens in m
        for kernel, median in MEDIANS.items()
    ]  # fmt: skip


class Store:
    """A new database that the app reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        open_database(str(path)).close()

    def add(self, *records: Record) -> None:
        file = self.path.with_suffix(".jsonl")
        write_records(file, records)
        with open_database(str(self.path)) as database, database.session() as session:
            import_file(session, file)

    def declare(self, run: RunInfo) -> None:
        with open_database(str(self.path)) as database, database.session() as session:
            begin_run(session, run, COMMIT)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty database."""
    path = tmp_path / "results.sqlite"
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(path))
    return Store(path)


@pytest.fixture
def filled(store: Store) -> Store:
    """Two kernels on two layers at M = 1 and 8 on an H200."""
    store.add(*records_of())
    return store


@pytest.fixture
def open_app() -> Iterator[Callable[..., AppTest]]:
    """Opens the app as a browser would, at a link if one is given; a page must never raise."""

    def opened(**link: str | list[str]) -> AppTest:
        app = AppTest.from_file(str(APP), default_timeout=30)
        for name, value in link.items():
            app.query_params[name.replace("_", "-")] = value
        app.run()
        assert not app.exception, app.exception
        return app

    yield opened
    st.cache_resource.clear()


@pytest.fixture(scope="session")
def make() -> Any:
    """The builders: make.a_run(), make.a_record(), make.records_of()."""
    from types import SimpleNamespace

    return SimpleNamespace(a_run=a_run, a_record=a_record, records_of=records_of, H200=H200)
