"""Makes the HTML page of results from its template, styles, scripts and data; equal documents give equal bytes."""

import base64
import hashlib
import importlib.util
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import msgspec

_SCRIPTS = ("columns.js", "standing.js", "heatmap.js", "runs.js", "figures.js", "memory.js", "page.js")


def page(held: Mapping[str, Any], *, title: str) -> str:
    """The page of a document that `rows.document` has made, as one HTML text that needs no other file.

    The browser may run only the scripts whose hashes the page names, and may load nothing from anywhere, so that
    a text of a result can never become a program.

    Args:
        title: name of the sweep or file, which a public page does not tell.
    """
    scripts = ["\n".join(map(_text, _SCRIPTS)), *_plotting()]
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}"
    ours, *plotting = (f"<script>{script}</script>" for script in scripts)
    return Template(_text("page.html")).substitute(
        title=escape("ultrabench report" if held["public"] else f"{title}: ultrabench report"),
        policy=policy,
        style=_text("page.css"),
        data=msgspec.json.encode(held).decode().replace("<", "\\u003c"),
        ours=ours,
        plotting="\n".join(plotting),
    )


def _text(name: str) -> str:
    return (files("ultrabench.analysis.page") / name).read_text(encoding="utf-8")


def _plotting() -> list[str]:
    """The scripts of Bokeh, from its installed package, which need not be imported for that."""
    bokeh_spec = importlib.util.find_spec("bokeh")
    (folder,) = bokeh_spec.submodule_search_locations or [] if bokeh_spec else []
    static = Path(folder) / "server" / "static" / "js"
    return [(static / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _hash(script: str) -> str:
    """The source expression of a Content Security Policy that allows this script (https://www.w3.org/TR/CSP3/)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
