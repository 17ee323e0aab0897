"""Pages of the app: what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from flexq_bench.dashboard.database import current_database, errors_shown
from flexq_bench.db.engine import Database


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the app; a call shows it. Its address is its title, that of the default page empty.

    content: shows what is below the title, given the database. writes_title: it shows the title
    itself.
    """

    content: Callable[[Database], None]
    title: str
    icon: str
    is_default: bool
    writes_title: bool

    def __call__(self) -> None:
        """Show the page; a DatabaseError is shown as one line."""
        if not self.writes_title:
            st.title(self.title)
        with errors_shown():
            self.content(current_database())

    def as_link(self) -> StreamlitPage:
        """Return the page for Streamlit's navigation and links."""
        address = None if self.is_default else self.title.lower()
        return st.Page(
            self, title=self.title, icon=self.icon, url_path=address, default=self.is_default
        )


def app_page(
    title: str, *, icon: str, is_default: bool = False, writes_title: bool = False
) -> Callable[[Callable[[Database], None]], Page]:
    """Make a page of a function that shows its content; see Page."""
    return lambda content: Page(content, title, icon, is_default, writes_title)
