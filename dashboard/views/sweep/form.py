"""Form that requests a sweep by the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import streamlit as st

from flexq_bench.dashboard.database import command_on, is_read_only, write_request
from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.views.fleet.tables import is_silent
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError
from flexq_bench.db.queries import WorkerRow
from flexq_bench.db.requests import RequestInfo
from flexq_bench.errors import FlexqError, UsageError
from flexq_bench.kernels.errors import KernelError
from flexq_bench.sweeps.sweep import CACHES, STAGES
from flexq_bench.sweeps.text import parse_sweep, split_sizes
from flexq_bench.workloads.case import parse_kernel_label
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.models import load_catalog
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.probes import is_probe

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import Backend

_SAVED = "sweep-form.saved"  # message of the last request, shown once after the rerun
_MODEL, _SIZES = "a model's layers", "N and K"
_MAX_SIZES_LENGTH = 10_000  # characters: enough for the maximum number of sizes
_MAX_TEXT_LENGTH = 1000
_USUAL = {"cuda": ("flexq", "cublaslt-w8a8"), "cpu": ("flexq-w6a6", "cublaslt-w8a8")}


@dataclass(frozen=True, slots=True)
class _Device:
    """A device model with a live worker."""

    gpu: str
    backend: Backend


def show_form(database: Database, workers: Sequence[WorkerRow], now: datetime) -> str | None:
    """Show the form; return the uuid of a request if one was queued, else None.

    workers: those that have not ended. If none of them is alive, a warning replaces the form.
    """
    st.header("Request a sweep", anchor=False)
    if is_read_only():
        st.caption("This dashboard is read-only: sweeps can't be requested here.")
        return None
    saved = st.session_state.pop(_SAVED, None)
    if saved is not None:
        st.success(as_text(saved), icon=":material/check:")
    devices = _alive(database, workers, now)
    if not devices:
        st.warning(
            "No worker is alive, so nothing would be measured. Start one on a machine with a GPU: "
            f"{command_on(database, 'worker')}",
            icon=":material/power_off:",
        )
        return None
    by_gpu = {device.gpu: device for device in devices}
    gpu = st.selectbox("GPU", list(by_gpu), key="sweep-form.gpu")
    shapes = st.radio("Shapes", [_MODEL, _SIZES], horizontal=True, key="sweep-form.shapes")
    backend: Backend = by_gpu[gpu].backend if gpu in by_gpu else "cuda"
    form = _fields(backend, shapes == _MODEL)
    if form is None:
        return None
    try:
        from flexq_bench.fleet.requests import MAX_CASES, sweep_request

        _check_offered("GPU", (gpu,), list(by_gpu))
        _check_offered("kernel", form.kernels, _kernels_of(backend))
        sweep = parse_sweep(
            kernels=",".join(form.kernels) or None, m=split_sizes(form.m),
            n=split_sizes(form.n), k=split_sizes(form.k), model=form.model,
            layers=form.layers, stage=",".join(form.stages), cache=",".join(form.caches),
            most_cases=MAX_CASES,
        )  # fmt: skip
        with database.session() as session:
            request = sweep_request(session, sweep, requester=form.person, gpu=gpu, backend=backend)
        if form.starts:
            write_request(request)
    except (FlexqError, WorkloadError, KernelError) as error:
        st.error(as_text(str(error)))
        return None
    except DatabaseError as error:
        st.error(as_text(str(error)), icon=":material/database_off:")
        return None
    words = _in_words(request)
    if not form.starts:
        st.info(as_text(words), icon=":material/timer:")
        return None
    st.session_state[_SAVED] = f"Queued as request {request.uuid[:8]}: {words}"
    return request.uuid


@dataclass(frozen=True, slots=True)
class _Form:
    """Form values as typed. n, k and model: None if shapes are chosen the other way."""

    kernels: tuple[str, ...]
    m: str
    n: str | None
    k: str | None
    model: str | None
    layers: str
    stages: tuple[str, ...]
    caches: tuple[str, ...]
    person: str
    starts: bool


def _kernels_of(backend: Backend) -> list[str]:
    from flexq_bench.kernels import (
        registry,  # imports torch, which a page without workers doesn't need
    )

    labels = registry.labels(backend)
    return [label for label in labels if not is_probe(parse_kernel_label(label)[0])]


def _check_offered(kind: str, chosen: Sequence[str], offered: Sequence[str]) -> None:
    """Raise UsageError for a value that is not in the form's list: clients may send any text."""
    for name in chosen:
        if name not in offered:
            raise UsageError(unknown(kind, name[:_MAX_TEXT_LENGTH], offered))


def _fields(backend: Backend, by_model: bool) -> _Form | None:
    """Show the form and return its values when a button is pressed; None: none was pressed."""
    labels = _kernels_of(backend)
    usual = [label for label in _USUAL[backend] if label in labels]
    with st.form("sweep-form", border=True):
        kernels = st.multiselect("Kernels", labels, default=usual)
        m = st.text_input(
            "M (tokens)", "1,2,4,8,16", max_chars=_MAX_SIZES_LENGTH,
            help="Sizes and ranges: 1,2,4:64:x2",
        )  # fmt: skip
        n = k = model = None
        layers = "fused"
        if by_model:
            model = st.selectbox("Model", sorted(load_catalog()))
            layers = st.text_input(
                "Layers", "fused", max_chars=_MAX_TEXT_LENGTH,
                help="fused, separate, or names separated by commas",
            )  # fmt: skip
        else:
            n, k = (
                st.text_input(label, "4096", max_chars=_MAX_SIZES_LENGTH)
                for label in ("N (output features)", "K (input features)")
            )
        stages = st.multiselect("Stages", STAGES, default=STAGES[:1])
        caches = st.multiselect("Caches", CACHES, default=CACHES[:1])
        person = st.text_input("Your name", max_chars=_MAX_TEXT_LENGTH)
        with st.container(horizontal=True):
            estimated = st.form_submit_button("Estimate", icon=":material/timer:")
            started = st.form_submit_button("Start", icon=":material/play_arrow:", type="primary")
    if not (estimated or started):
        return None
    return _Form(
        tuple(kernels), m, n, k, model, layers, tuple(stages), tuple(caches), person, started
    )


def _alive(database: Database, workers: Sequence[WorkerRow], now: datetime) -> list[_Device]:
    alive = {worker.gpu for worker in workers if not is_silent(worker, now)}
    with database.session() as session:
        backends = {device.sku: device.backend for device in queries.devices(session)}
    return [_Device(gpu, "cpu" if backends.get(gpu) == "cpu" else "cuda") for gpu in sorted(alive)]


def _in_words(request: RequestInfo) -> str:
    """Return `12 cases on NVIDIA H200, about 40 s of measuring`."""
    cases = "1 case" if request.cases == 1 else f"{request.cases} cases"
    seconds = request.expected_s
    if seconds is None:
        how_long = "no similar case was measured before, so there is no estimate"
    elif seconds < 90:
        how_long = f"about {seconds:.0f} s of measuring"
    else:
        how_long = f"about {seconds / 60:.0f} min of measuring"
    return f"{cases} on {request.gpu}, {how_long}"
