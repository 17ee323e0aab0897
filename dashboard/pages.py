"""Pages of the app: what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from flexq_bench.dashboard.database import current_database, errors_shown
from flexq_bench.db.engine import Database

HOME, PERFORMANCE, ACCURACY, RUNS, EXPLORE = SECTIONS = (
    *("Home", "Performance", "Accuracy", "Runs", "Explore"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the app; a call shows it. Its address is its title, that of the default page empty.

    content: shows what is below the title, given the database. section: one of SECTIONS.
    writes_title: it shows the title itself. is_detail: it shows a selected thing, so only links
    lead to it.
    """

    content: Callable[[Database], None]
    title: str
    icon: str
    section: str
    is_default: bool
    writes_title: bool
    is_detail: bool
    address: str

    def __call__(self) -> None:
        """Show the page; a DatabaseError is shown as one line."""
        if not self.writes_title:
            st.title(self.title)
        with errors_shown():
            self.content(current_database())

    def as_link(self, *, opens_section: bool = False) -> StreamlitPage:
        """Return the page for Streamlit's navigation and links.

        opens_section: it stands for its section in the navigation; other pages are not listed.
        """
        return st.Page(
            self,
            title=self.section if opens_section else self.title,
            icon=self.icon,
            url_path=None if self.is_default else self.address,
            default=self.is_default,
            visibility="visible" if opens_section else "hidden",
        )


def app_page(
    title: str,
    *,
    section: str,
    icon: str,
    is_default: bool = False,
    writes_title: bool = False,
    is_detail: bool = False,
    address: str = "",
) -> Callable[[Callable[[Database], None]], Page]:
    """Make a page of a function that shows its content; see Page. address empty: of the title."""
    place = address or title.lower()
    return lambda content: Page(
        content, title, icon, section, is_default, writes_title, is_detail, place
    )
