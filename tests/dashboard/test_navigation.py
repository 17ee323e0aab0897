"""Sections, links between pages, and the project, branch and database on each page."""

from __future__ import annotations

from dataclasses import replace

from made_results import COMMIT, a_record, a_run
from page_content import tables, words
from streamlit.testing.v1 import AppTest


def place(app: AppTest) -> str:
    text = "\n".join(str(part.value) for part in app.sidebar.markdown)
    return text.replace("\\", "")


def test_home_is_first_and_names_project_and_database(filled, open_app):
    app = open_app()

    assert app.title[0].value == "Home"
    assert "Project **FlexQ Bench**" in place(app)
    assert "database **results.sqlite**" in place(app)


def test_empty_database_names_no_project(store, open_app):
    assert "No project has a result" in place(open_app())


def test_selected_project_is_in_the_link_and_on_its_pages(filled, open_app):
    acme = {"commit": replace(COMMIT, project="acme"), "project": "acme"}
    filled.add(a_record(a_run("theirs"), kernel="their.kernel", median_us=80.0, **acme))

    ours, theirs = open_app(), open_app(project="acme")

    assert "Project **acme**" in place(theirs)
    assert "their.kernel" not in str(tables(ours))
    kernels = [f for f in tables(theirs) if "last week" in f.columns]
    assert kernels[0]["kernel"].tolist() == ["their.kernel"]
    assert "project=acme" in kernels[0]["history"].iloc[0]


def test_unknown_project_of_a_link_is_named(filled, open_app):
    assert "project no-such" in words(open_app(project="no-such"))
