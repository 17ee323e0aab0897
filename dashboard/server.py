"""ASGI application of `flexq-bench dashboard`: the Streamlit script, behind the browser guard."""

from __future__ import annotations

import os
import pkgutil
from importlib import import_module
from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from flexq_bench.dashboard import views
from flexq_bench.read_api.browser_guard import HOSTS_VARIABLE, PAGE_POLICY, BrowserGuard

# The first viewer need not wait for the imports of pages.
for module in pkgutil.walk_packages(views.__path__, f"{views.__name__}."):
    import_module(module.name)

app = App(
    Path(__file__).with_name("app.py"),
    middleware=[
        Middleware(
            BrowserGuard,
            hosts=os.environ.get(HOSTS_VARIABLE, "localhost").split(","),
            policy=PAGE_POLICY,
        )
    ],
)
