"""Controls whose state is in the URL, so that views can be linked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from flexq_bench.dashboard.shared.formatting import as_text
from flexq_bench.dashboard.shared.results_frame import narrowed

T = TypeVar("T")


class Stored(Protocol):
    """A row of the database that a page shows one of."""

    @property
    def uuid(self) -> str: ...


StoredT = TypeVar("StoredT", bound=Stored)


@contextmanager
def page_controls(page: str, reason: str) -> Iterator[Controls]:
    """Give controls to the block, then warn above it of ignored values, and offer to clear them.

    reason: why values of the URL are ignored.
    """
    controls = Controls(page)
    on_top = st.empty()
    yield controls
    controls.warn_of_ignored(on_top, reason)
    controls.offer_to_clear()


class Controls:
    """Controls of one page. A control at its default has no parameter in the URL.

    Values in the URL that are no longer options are ignored and listed in `ignored`.
    """

    def __init__(self, page: str) -> None:
        self._page = page
        self.ignored: list[str] = []
        self.is_narrowed = False  # True if a control is not at its default

    def select(
        self,
        place: DeltaGenerator,
        name: str,
        label: str,
        options: Sequence[T],
        default: T | None = None,
        *,
        format_func: Callable[[T], str] = str,
        to_url: Callable[[T], str] = str,
        radio: bool = False,
        always_in_url: bool = False,
    ) -> T:
        """Show a control that selects one option; none if there is only one option.

        default: None: the first option. radio: radio buttons in a row, instead of a list.
        format_func: label of an option. to_url: its text in the URL. always_in_url: write the
        default to the URL too, since it changes over time.
        """
        if default is None:
            default = options[0]
        if len(options) < 2 and name not in st.query_params and not always_in_url:
            return default
        requested = self._requested(name, label, options, to_url)
        key = self._prepare(name, options, requested[0] if requested else default)
        st.session_state[f"{key}.default"] = to_url(default)
        if radio:
            # Streamlit parses labels of radio buttons as Markdown, unlike those of lists.
            value = place.radio(
                label,
                options,
                format_func=lambda option: as_text(format_func(option)),
                key=key,
                horizontal=True,
            )
        else:
            value = place.selectbox(label, options, format_func=format_func, key=key)
        assert value is not None  # None only if there are no options
        self._write(name, [] if value == default and not always_in_url else [to_url(value)])
        return value

    def select_row(
        self,
        name: str,
        label: str,
        rows: Sequence[StoredT],
        title: Callable[[StoredT], str],
        *,
        always_in_url: bool = False,
    ) -> StoredT:
        """Select a row, by default the first one; the URL has the beginning of its uuid."""
        by_uuid = {row.uuid: row for row in rows}
        chosen = self.select(
            st.container(),
            name,
            label,
            list(by_uuid),
            format_func=lambda uuid: title(by_uuid[uuid]),
            to_url=lambda uuid: uuid[:8],
            always_in_url=always_in_url,
        )
        return by_uuid[chosen]

    def multiselect(
        self,
        place: DeltaGenerator,
        name: str,
        label: str,
        options: Sequence[T],
        *,
        placeholder: str = "all",
        format_func: Callable[[T], str] = str,
        to_url: Callable[[T], str] = str,
    ) -> tuple[T, ...]:
        """Show a control that selects several options; none if there is only one option.

        placeholder: the meaning of an empty selection. Other arguments as of `select`.
        """
        if len(options) < 2 and name not in st.query_params:
            return ()
        key = self._prepare(name, options, self._requested(name, label, options, to_url))
        values = place.multiselect(
            label, options, format_func=format_func, key=key, placeholder=placeholder
        )
        self._write(name, [to_url(value) for value in values])
        return tuple(values)

    def narrow(self, frame: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
        """Show a filter in the sidebar for each column, and return the rows that pass all.

        columns: column, which is also its name in the URL -> label.
        """
        accepted = {
            column: self.multiselect(
                st.sidebar,
                column,
                label,
                sorted(frame[column].dropna().unique().tolist()),
                format_func=lambda value: str(value) or "(none)",
            )
            for column, label in columns.items()
        }
        return narrowed(frame, accepted)

    def toggle(self, place: DeltaGenerator, name: str, label: str, *, hint: str) -> bool:
        """Show a toggle, off by default."""
        on = "on"
        linked = st.query_params.get(name) == on
        stored = st.session_state.get(f"{self._page}.{name}", linked)
        value = place.toggle(label, key=self._prepare(name, (), stored), help=hint)
        self._write(name, [on] if value else [])
        return value

    def warn_of_ignored(self, place: DeltaGenerator, reason: str) -> None:
        """Show the ignored values of the URL, if any. reason: why they are ignored."""
        if self.ignored:
            missing = ", ".join(as_text(name) for name in self.ignored)
            place.warning(f"{reason}: {missing}.")

    def offer_to_clear(self) -> None:
        """Show a button in the sidebar that resets all controls, if one is not at its default."""
        if self.is_narrowed:
            st.sidebar.button("Clear all", on_click=self.clear, icon=":material/filter_alt_off:")

    def clear(self) -> None:
        """Reset all controls of the page; for a button's callback."""
        for key in list(st.session_state):
            if str(key).startswith(f"{self._page}."):
                del st.session_state[key]
        st.query_params.clear()

    def _requested(
        self, name: str, label: str, options: Sequence[T], to_url: Callable[[T], str]
    ) -> list[T]:
        """Return the values of the control, or on the first visit the values in the URL."""
        by_text = {to_url(option): option for option in options}
        stored = st.session_state.get(f"{self._page}.{name}")
        if stored is None:
            texts = st.query_params.get_all(name)
        else:
            texts = [to_url(value) for value in (stored if isinstance(stored, list) else [stored])]
        # The default before the options changed was not requested by the viewer.
        old_default = {st.session_state.get(f"{self._page}.{name}.default")} - {
            *st.query_params.get_all(name)
        }
        obsolete = [text for text in texts if text not in by_text and text not in old_default]
        self.ignored += [f"{label.lower()} {text}" for text in obsolete]
        return [by_text[text] for text in texts if text in by_text]

    def _prepare(self, name: str, options: Sequence[Any], value: Any) -> str:
        """Return the control's key, and set its state where Streamlit would not keep it.

        This is on the first visit, after the options changed, and if Streamlit dropped the value.
        """
        key = f"{self._page}.{name}"
        remembered = f"{key}.options"
        changed = st.session_state.get(remembered) != tuple(options)
        if changed or key not in st.session_state or st.session_state[key] != value:
            st.session_state[key] = value
        st.session_state[remembered] = tuple(options)
        return key

    def _write(self, name: str, texts: list[str]) -> None:
        self.is_narrowed |= bool(texts)
        if texts == st.query_params.get_all(name):
            return
        if texts:
            st.query_params[name] = texts
        else:
            del st.query_params[name]
