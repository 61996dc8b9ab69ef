"""Makes the HTML page of a result table from its template, styles, scripts and data; equal tables give equal bytes."""

import base64
import hashlib
import importlib.util
import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import pyarrow as pa

from ultrabench.analysis.page.rows import document

_SCRIPTS = ("columns.js", "heatmap.js", "runs.js", "figures.js", "page.js")


def page(table: pa.Table, *, title: str, public: bool = False) -> str:
    """The page of a result table with all columns of the schema, as one HTML text that needs no other file.

    The browser may run only the scripts whose hashes the page names, and may load nothing from anywhere, so that
    a text of a result can never become a program.

    Args:
        title: name of the sweep or file.
        public: whether to leave out whatever may name hosts, paths, users or accounts.

    Raises:
        ConfigError: the rows cannot be ranked together.
    """
    held = document(table, public=public)
    scripts = ["\n".join(map(_text, _SCRIPTS)), *_plotting()]
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}"
    ours, *plotting = (f"<script>{script}</script>" for script in scripts)
    return Template(_text("page.html")).substitute(
        title=escape("ultrabench report" if public else f"{title}: ultrabench report"),
        policy=policy,
        style=_text("page.css"),
        data=json.dumps(held, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        ours=ours,
        plotting="\n".join(plotting),
    )


def _text(name: str) -> str:
    return (files("ultrabench.analysis.page") / name).read_text(encoding="utf-8")


def _plotting() -> list[str]:
    """The scripts of Bokeh, from its installed package, which need not be imported for that."""
    found = importlib.util.find_spec("bokeh")
    (folder,) = found.submodule_search_locations or [] if found else []
    static = Path(folder) / "server" / "static" / "js"
    return [(static / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _hash(script: str) -> str:
    """The source expression of a Content Security Policy that allows this script (https://www.w3.org/TR/CSP3/)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
