"""Controls that select an operation, and a value of each of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.records import LINEAR
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import operation, parse_values


def choose_operation(controls: Controls, database: Database, gpu: str) -> str:
    """Select one of the operations that were timed on a GPU; linear layers by default."""
    with database.session() as session:
        names = queries.operation_names(session, gpu)
    ordered = sorted(names or (LINEAR,), key=lambda name: (name != LINEAR, name))
    return controls.select(st.sidebar, "operation", "Operation", ordered)


def values_of(frame: pd.DataFrame) -> list[dict[str, Value]]:
    """Return the parameters of each row."""
    return [dict(parse_values(text)) for text in frame["parameters"]]


def axes_of(name: str, values: Sequence[Mapping[str, Value]]) -> tuple[str, ...]:
    """Return the parameters of an operation over which results may be drawn; those that vary.

    Of a user's operation, whose definition is not known here, these are all numbers that vary.
    """
    options: dict[str, set[Value]] = {}
    for row in values:
        for parameter, value in row.items():
            options.setdefault(parameter, set()).add(value)
    varying = [
        parameter
        for parameter, several in options.items()
        if len(several) > 1 and all(isinstance(value, int) for value in several)
    ]
    try:
        axes = operation(name).axes
    except WorkloadError:
        return tuple(varying)
    return tuple(axis for axis in axes if axis in varying)


def choose_parameters(
    controls: Controls, place: DeltaGenerator, frame: pd.DataFrame, *, free: str = ""
) -> pd.DataFrame:
    """Select a value of each parameter that varies, and return the rows that have them.

    free: a parameter that is not selected; empty: all are.
    """
    names = dict.fromkeys(name for row in values_of(frame) for name in row if name != free)
    for name in names:
        values = [row.get(name, "") for row in values_of(frame)]
        options = sorted(set(values), key=lambda value: (isinstance(value, str), value))
        if options:
            chosen = controls.select(place, f"p-{name}", name.replace("_", " "), options)
            frame = frame[[value == chosen for value in values]]
    return frame
