"""Page that shows the OpenAPI document to people, without scripts or files of other sites."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .6rem;"
    "border-bottom:1px solid #ccc;vertical-align:top}code{background:#eee;padding:0 .2rem}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML."""
    info = document["info"]
    title = escape(f"{info['title']} API {info['version']}")
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(info['description'])}</p>"
        f'<p><a href="openapi.json">OpenAPI document</a></p>{operations}</body></html>'
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(parameter['name'])}</code></td>"
        f"<td>{escape(_type(parameter['schema']))}</td>"
        f"<td>{escape(parameter['description'])}</td></tr>"
        for parameter in operation.get("parameters", ())
    )
    table = f"<table><tr><th>parameter<th>type<th>meaning</tr>{rows}</table>" if rows else ""
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(operation['summary'])}</p>{table}"
    )


def _type(schema: Mapping[str, Any]) -> str:
    if schema["type"] == "array":
        return f"{_type(schema['items'])}, repeatable"
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "maximum" in schema:
        return f"{schema['minimum']} to {schema['maximum']:,}"
    return "time or date" if "anyOf" in schema else str(schema["type"])
