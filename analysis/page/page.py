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

_PAGE_SCRIPTS = ("columns.js", "standing.js", "heatmap.js", "runs.js", "figures.js", "memory.js", "page.js")


def page(document: Mapping[str, Any], *, title: str) -> str:
    """The page of a document that `rows.document` has made, as one HTML text that needs no other file.

    The browser may run only the scripts whose hashes the page names, and may load nothing from anywhere, so that
    a text of a result can never become a program.

    Args:
        title: name of the sweep or file, which a public page leaves out.
    """
    scripts = ["\n".join(map(_file_text, _PAGE_SCRIPTS)), *_bokeh_scripts()]
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {' '.join(map(_csp_hash, scripts))}"
    )
    own_script, *bokeh_scripts = (f"<script>{script}</script>" for script in scripts)
    return Template(_file_text("page.html")).substitute(
        title=escape("ultrabench report" if document["public"] else f"{title}: ultrabench report"),
        policy=policy,
        style=_file_text("page.css"),
        data=msgspec.json.encode(document).decode().replace("<", "\\u003c"),
        own_script=own_script,
        bokeh_scripts="\n".join(bokeh_scripts),
    )


def _file_text(file_name: str) -> str:
    return (files("ultrabench.analysis.page") / file_name).read_text(encoding="utf-8")


def _bokeh_scripts() -> list[str]:
    """The scripts of Bokeh, read from its installed package without importing it, which is slow."""
    bokeh_spec = importlib.util.find_spec("bokeh")
    (package_folder,) = bokeh_spec.submodule_search_locations or [] if bokeh_spec else []
    js_folder = Path(package_folder) / "server" / "static" / "js"
    return [(js_folder / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _csp_hash(script: str) -> str:
    """The source expression of a Content Security Policy that allows this script (https://www.w3.org/TR/CSP3/)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
