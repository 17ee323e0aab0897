"""URLs in tables: of pages of the app, and of commits on the repository's web site."""

from __future__ import annotations

import os
import re
from typing import Protocol
from urllib.parse import urlencode

import streamlit as st

from flexq_bench.dashboard.settings import COMMIT_URL_VARIABLE, PLACE_OF_SHA

PROJECT = "project"  # the parameter that selects a project on all pages
ALERT = "alert"  # the parameter that selects an alert, and its project
_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit_url(sha: str) -> str | None:
    """Return the URL of a commit by the app's template.

    None: no template was given, or it is not a commit of a git tree.
    """
    template = os.environ.get(COMMIT_URL_VARIABLE, "")
    if not template or not _SHA.fullmatch(sha):
        return None
    return template.replace(PLACE_OF_SHA, sha)


class HasPlace(Protocol):
    """A result or series, as far as the history of its kernel goes."""

    @property
    def kernel(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def parameters(self) -> str: ...
    @property
    def m(self) -> int | None: ...
    @property
    def n(self) -> int | None: ...
    @property
    def k(self) -> int | None: ...


def history_address(row: HasPlace, **more: str) -> str:
    """Return the URL of the history of a kernel at one shape. more: other parameters."""
    if row.operation == "linear":
        place = {"m": str(row.m), "shape": f"{row.n}x{row.k}"}
    else:
        place = {"operation": row.operation, "parameters": row.parameters}
    of_kernel = {"kernel": row.kernel, "gpu": row.gpu, "stage": row.stage}
    return page_address("history", **of_kernel, **place, **more)


def page_address(page: str, **query: str) -> str:
    """Return the relative URL of a page, of the selected project. query: its parameters."""
    if PROJECT in st.query_params:
        query = {PROJECT: st.query_params[PROJECT], **query}
    return f"{page}?{urlencode(query)}"
