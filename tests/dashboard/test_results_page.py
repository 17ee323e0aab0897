"""The Results page as a person meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from made_results import a_record, a_run, records_of
from streamlit.testing.v1 import AppTest

Opened = Callable[..., AppTest]


def words(app: AppTest) -> str:
    """Everything that the page says outside of its table."""
    parts: list[Any] = [*app.markdown, *app.caption, *app.info, *app.warning, *app.error]
    return "\n".join(str(part.value) for part in parts)


def table(app: AppTest) -> Any:
    return app.dataframe[0].value


def test_an_empty_database_says_how_to_fill_it(store: Any, open_app: Opened) -> None:
    app = open_app()

    assert "run smoke" in words(app)
    assert "db import" in words(app)
    assert not app.dataframe


def test_a_missing_database_is_one_line_and_no_exception(
    store: Any, open_app: Opened, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FLEXQ_BENCH_DB", "/nowhere/at/all.sqlite")

    app = open_app()

    assert [error.value for error in app.error]
    assert not app.dataframe


def test_every_result_of_the_latest_run_is_in_the_table(filled: Any, open_app: Opened) -> None:
    shown = table(open_app())

    assert len(shown) == 2 * 2 * 2
    speedups = shown[shown["kernel"] == "flexq-w6a6"]["speedup"]
    assert set(speedups.round(3)) == {1.5}


def test_a_link_narrows_the_table(filled: Any, open_app: Opened) -> None:
    app = open_app(kernel="flexq-w6a6", m="8")

    shown = table(app)
    assert set(shown["kernel"]) == {"flexq-w6a6"}
    assert set(shown["m"]) == {8}


def test_a_filter_chosen_on_the_page_goes_into_the_link(filled: Any) -> None:
    # AppTest loses a page of st.navigation at the second run, so this is the page by itself.
    app = AppTest.from_string(
        "from dashboard.pages.results import page\npage()", default_timeout=30
    ).run()
    kernels = next(widget for widget in app.multiselect if widget.label == "Kernel")

    app = kernels.select("flexq-w6a6").run()

    assert set(table(app)["kernel"]) == {"flexq-w6a6"}
    assert app.query_params["kernel"] == "flexq-w6a6"


def test_a_link_to_what_is_not_there_says_so(filled: Any, open_app: Opened) -> None:
    app = open_app(kernel="no-such-kernel")

    assert "no-such-kernel" in words(app).replace("\\", "")
    assert len(table(app)) == 8


def test_an_incorrect_result_is_flagged_and_never_compared(store: Any, open_app: Opened) -> None:
    run = a_run()
    good, bad = records_of(run, m=[1])[:2]
    wrong = a_record(
        run, kernel=bad.kernel, m=1, model="llama-7b", layer="o_proj", status="incorrect",
        detail="y[0,0] = 1, expected 2", accepted=False, exact=False,
    )  # fmt: skip
    store.add(good, wrong)

    app = open_app()

    assert any("incorrect" in error.value for error in app.error)
    shown = table(app)
    assert shown[shown["status"] == "incorrect"]["speedup"].isna().all()


def test_one_result_alone_is_shown(store: Any, open_app: Opened) -> None:
    store.add(a_record())

    assert len(table(open_app())) == 1


def test_a_run_without_results_yet_says_so(store: Any, open_app: Opened) -> None:
    store.declare(a_run(status="running", plan=("flexq-w6a6 gemm cold m1n4096k4096",)))

    app = open_app()

    assert words(app)
    assert not app.dataframe


def test_text_from_records_is_never_markup(store: Any, open_app: Opened) -> None:
    store.add(a_record(layer="<b>x</b>", model="[a](http://example.org)"))

    app = open_app()

    assert "<b>x</b>" not in words(app)
