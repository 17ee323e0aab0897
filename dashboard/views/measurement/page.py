"""Measurement: one result with its raw samples, which only this page reads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import tzinfo
from typing import Any

import pandas as pd
import streamlit as st

from flexq_bench.dashboard.pages import PERFORMANCE, app_page
from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import Style, kernel_styles
from flexq_bench.dashboard.shared.formatting import (
    as_code,
    as_text,
    local_time,
    short_commit,
    throttle_in_words,
    time_zone,
)
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.dashboard.views.measurement import charts
from flexq_bench.dashboard.views.results import page as results
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.queries import ResultDetail, ResultRow
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.operation import describe
from flexq_bench.workloads.probes import is_probe

URL = "measurement"
_UUID = "uuid"  # in the link
_PROBE = Style("#5A6978", "circle")
_STATE = {
    "sm_clock_mhz": "SM clock (MHz)",
    "mem_clock_mhz": "memory clock (MHz)",
    "power_w": "power (W)",
    "temperature_c": "temperature (°C)",
    "throttle_mask": "throttle reasons",
}


def link_of(measurement_uuid: str) -> dict[str, str]:
    """Return the query parameters of a link to this page."""
    return {_UUID: measurement_uuid}


@app_page("Measurement", section=PERFORMANCE, is_detail=True, icon=":material/scatter_plot:")
def page(database: Database) -> None:
    """Show the samples of the measurement `?uuid=…`: distribution, order and clock."""
    uuid = st.query_params.get(_UUID)
    if uuid is None:
        st.info(
            "No measurement is selected. Click a point of a chart on the History page, or a uuid "
            "in its table.",
            icon=":material/show_chart:",
        )
        return
    with database.session() as session:
        try:
            detail = queries.result_detail(session, uuid)
            samples = queries.samples_of(session, uuid)
        except NotFoundError:
            st.warning(
                f"There is no measurement {as_code(uuid)} in {as_code(database.url)}: choose "
                "a point on the History page."
            )
            return
        kernels = queries.kernel_names(session)
    _show(detail, samples, _style_of(detail.result, kernels))


def _style_of(result: ResultRow, kernels: tuple[str, ...]) -> Style:
    if is_probe(result.kernel):
        return _PROBE
    label = kernel_label(result.kernel, result.variant)
    return kernel_styles(kernels, [(result.kernel, result.variant)])[label]


def _show(detail: ResultDetail, samples: charts.Placements, style: Style) -> None:
    result = detail.result
    _show_facts(detail, time_zone(st.context.timezone))
    st.page_link(
        results.page.as_link(),
        label=f"All results of run {result.run[:8]}",
        icon=":material/table_chart:",
        query_params={"run": result.run[:8]},
    )
    if not any(samples):
        if result.median_us is None:
            st.info("It was not timed, so there are no samples: see its status.")
        else:
            st.info(
                "Its raw samples were pruned, or not stored. Measure again to get new ones; "
                "summaries are never deleted."
            )
    else:
        invalid = detail.extra.get("invalid", {}).get("samples", ())
        st.header("Spread of the samples", anchor=False)
        draw_chart(charts.ecdf(samples, result, style), key="ecdf")
        st.header("In the order measured", anchor=False)
        draw_chart(
            charts.order_plot(samples, invalid, detail.placement_medians_us, result, style),
            key="order",
        )
        st.caption(
            "Each repeat allocates all buffers again: differences between repeats are due to the "
            "buffers' addresses, a drift within a repeat to the machine. The time of a repeat, and "
            "that of the result, is a trimmed mean on a GPU; it is the median on a CPU, and before "
            "version 4 of the protocol."
        )
    _show_device(detail)


def _show_facts(detail: ResultDetail, zone: tzinfo) -> None:
    r = detail.result
    label = kernel_label(r.kernel, r.variant)
    place = " ".join(part for part in (r.model, r.layer) if part)
    st.markdown(
        f"**{as_text(label)}** · {as_text(describe(r.operation, r.parameters))} · "
        f"{as_text(f'{r.stage} {r.cache}')} · "
        f"{as_text(r.gpu)}" + (f" · {as_text(place)}" if place else "")
    )
    time = "never timed" if r.median_us is None else f"{r.median_us:.5g} µs"
    if r.ci_low_us is not None and r.ci_high_us is not None:
        time += f" (95 % interval {r.ci_low_us:.5g} to {r.ci_high_us:.5g})"
    lines = [
        f"**{as_text(r.status)}**" + (f": {as_text(r.detail)}" if r.detail else ""),
        as_text(f"{time}, {r.n_samples} samples in {len(detail.placement_medians_us)} "
                f"repeats of allocation, {detail.n_invalid} of them at too low a clock"),
        f"commit {as_code(short_commit(r.commit, r.dirty))} · "
        f"{as_text(local_time(r.created_at, zone))} · "
        + ("accepted" if r.accepted else "not accepted: it is compared with nothing"),
        f"configuration {as_code(str(r.config))}",
    ]  # fmt: skip
    st.markdown("  \n".join(lines))


def _show_device(detail: ResultDetail) -> None:
    st.header("Clock and device", anchor=False)
    readings = _readings(detail)
    clocked = {
        when: state for when, state in readings.items() if state.get("sm_clock_mhz") is not None
    }
    if clocked:
        draw_chart(charts.clock_plot(clocked), key="clock")
        st.caption(
            "Single readings before and after; during the samples the median of a thread's "
            "readings. They have no interval."
        )
    else:
        st.info("No clock was read: the device is a CPU, or the driver did not report it.")
    table = [
        {"when": when, **{shown: _reading(name, state) for name, shown in _STATE.items()}}
        for when, state in readings.items()
        if any(state.get(name) is not None for name in _STATE)
    ]
    if table:
        draw_table(table, key="readings")
    facts = {"device": detail.device, "seed": str(detail.seed), **detail.environment}
    if "tool" in detail.environment:  # of another tool: what it states of its result
        facts |= {name: value for name, value in detail.extra.items() if value}
    draw_table(
        pd.DataFrame({"environment": list(facts), "value": [str(v) for v in facts.values()]}),
        key="environment",
    )


def _reading(name: str, state: Mapping[str, Any]) -> Any:
    value = state.get(name)
    return throttle_in_words(value) if name == "throttle_mask" else value


def _readings(detail: ResultDetail) -> dict[str, Mapping[str, Any]]:
    """Return the known states of the device before, during and after the measurement."""
    during = {name: getattr(detail, name) for name in _STATE}
    return {
        "before": detail.extra.get("before", {}),
        "during": during,
        "after": detail.extra.get("after", {}),
    }
