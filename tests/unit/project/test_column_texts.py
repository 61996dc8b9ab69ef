"""Units, directions and formats of columns stand in the homes of columns alone; all else asks a column for them."""

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from ultrabench.analysis.results.columns import RESULT_TABLE, column_of
from ultrabench.column import NUMBER, Better
from ultrabench.result import RESULT_COLUMNS
from ultrabench.sweep.predict.predict import PREDICTION_COLUMNS

ROOT = Path(__file__).parents[3]
ROOMS = ("src/ultrabench", "sweep", "launchers", "agent", "kernel", "analysis")
HOMES = {"src/ultrabench/column.py", "analysis/results/columns.py", "analysis/page/columns.js"}
COLUMNS = {**RESULT_TABLE, **PREDICTION_COLUMNS, **RESULT_COLUMNS}
"""Name of a column, or of the field that describes it -> the column."""
MEASURES = {name: column for name, column in COLUMNS.items() if column.unit != NUMBER}
HEADINGS = {column.heading for column in MEASURES.values() if column.title}
"""Names of columns for people, such as tokens/s/GPU."""
SYMBOLS = {
    symbol
    for unit in {column.unit for column in MEASURES.values()}
    for symbol in (unit.symbol, unit.axis_symbol, unit.short)
    if symbol not in ("", "s", "fraction", "%", "% of peak", "W", "J", "B")
} | {"MiB"}
"""Symbols of units that no word of English contains."""
SYMBOL = re.compile("|".join(rf"(?<![\w/]){re.escape(symbol)}(?![\w/])" for symbol in sorted(SYMBOLS)))
RATE = re.compile("|".join(map(re.escape, sorted(symbol for symbol in SYMBOLS if "/s" in symbol))))
SCALES = {100, 1e3, 1e6, 1e9, 1e12, 2**10, 2**20, 2**30, 1024}
DIRECTIONS = {str(better) for better in Better if better != Better.NONE}
DIRECTION = re.compile(rf"\b(?:{'|'.join(sorted(DIRECTIONS))}) is better\b")


def measure_in(node):
    """The column with a unit that an expression is, as an attribute or by a text as its key; else None."""
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr in MEASURES else None
    if not isinstance(node, ast.Subscript):
        return None
    key = node.slice.values[-1] if isinstance(node.slice, ast.JoinedStr) else node.slice
    return key.value if isinstance(key, ast.Constant) and key.value in MEASURES else None


def is_scale(node):
    is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    value = node.value if isinstance(node, ast.Constant) else 2**30 if is_power else None
    return value in SCALES or (isinstance(node, ast.Name) and node.id in ("GIB", "unit_bytes"))


def texts_of(function):
    """The texts of a function that are no docstring."""
    docstrings = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(function) if isinstance(node, ast.Constant))
    return [node for node in constants if isinstance(node.value, str) and id(node) not in docstrings]


def own_texts(text):
    """(line, reason) of each text of a Python module that has a unit, a direction or a format of a column.

    Tables of constants at the top of a module are not searched: they describe what a text of a user means.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            names = filter(None, map(measure_in, ast.walk(node.value)))
            yield from ((node.lineno, f"format of {name}") for name in names)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            for operand, factor in ((node.left, node.right), (node.right, node.left)):
                if (name := measure_in(operand)) and is_scale(factor):
                    yield node.lineno, f"unit of {name}"
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        constants = texts_of(function)
        keys = {constant.value for constant in constants}
        attributes = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        shown_units = {MEASURES[name].unit for name in (keys | attributes) & MEASURES.keys()}
        shown_symbols = set(chain(*((u.symbol, u.axis_symbol, u.short) for u in shown_units)))
        for constant in constants:
            if constant.value.removeprefix(">") in HEADINGS:
                yield constant.lineno, f"heading {constant.value}"
            if constant.value in DIRECTIONS or DIRECTION.search(constant.value):
                yield constant.lineno, f"direction {constant.value}"
            if RATE.search(constant.value) or shown_symbols & {*SYMBOL.findall(constant.value)}:
                yield constant.lineno, f"unit in {constant.value!r}"


def own_texts_of_script(text):
    """(line, reason) of each line of a script that has a unit or a heading of a column, or that makes GiB of bytes."""
    words = re.compile(
        "|".join(rf"(?<![\w/]){re.escape(word)}(?![\w/])" for word in sorted(SYMBOLS | HEADINGS))
    )
    for line_no, line in enumerate(text.splitlines(), start=1):
        code = line.partition("//")[0]
        if words.search(code) or "GIB" in code or "2 ** 30" in code:
            yield line_no, line.strip()


def test_no_module_has_a_unit_a_direction_or_a_format_of_a_column():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.parent.is_symlink()]
    texts_by_file = {
        name: texts
        for path in paths
        if (name := str(path.relative_to(ROOT))) not in HOMES
        if (texts := sorted({*own_texts(path.read_text())}))
    }
    assert texts_by_file == {}


def test_no_script_of_the_page_has_one():
    texts_by_file = {
        name: texts
        for path in (ROOT / "analysis").rglob("*.js")
        if (name := str(path.relative_to(ROOT))) not in HOMES
        if (texts := [*own_texts_of_script(path.read_text())])
    }
    assert texts_by_file == {}


@pytest.mark.parametrize(
    "text",
    [
        "f'{row[\"peak_mem_bytes\"] / GIB:.1f}'", "f'step {run.prediction.step_time_s:.3g}'",
        "shown = 100 * cell.mfu", "peak_gib = prediction.peak_mem_bytes / 2**30",
        "def head():\n    return '>tokens/s/GPU'", "def head():\n    return f'{rate:,.0f} tokens/s'",
        "def peak(row):\n    return f'{size(row[\"predicted_peak_mem_bytes\"])} GiB'",
        "def rank():\n    return 'lower'", "def title(name):\n    return f'{name} (lower is better)'",
    ],
)  # fmt: skip
def test_a_text_made_by_hand_is_seen(text):
    assert [*own_texts(text)]


def test_texts_of_a_column_and_tables_are_not_seen():
    assert not [
        *own_texts("WORDS = {'>tokens/s/GPU': 'GiB'}\ntext = column_of('mfu').text(row['mfu'])"),
        *own_texts("def f(row):\n    'Bytes in GiB.'\n    return row['step_time_s'] / 2"),
        *own_texts("def f(path):\n    return f'{path}: skipped a line of more than {n} MiB'"),
    ]


def test_a_unit_in_a_script_is_seen():
    for line in ("const name = 'tokens/s/GPU';", "text = `${x} GiB`;", "title = 'MFU';", "bytes / 2 ** 30"):
        assert [*own_texts_of_script(line)], line
    assert not [*own_texts_of_script("const name = headingOf(RATE); // tokens/s/GPU")]


@pytest.mark.parametrize(
    ("name", "value", "text", "bare_text", "bare_heading"),
    [
        ("predicted_peak_mem_bytes", 26_306_674_688, "24.5 GiB", "24.5", "peak GiB"),
        ("step_time_s", 2.3456, "2.346 s", "2.35", "step s"), ("step_time_s", 1234.5, "1234 s", "1,234", "step s"),
        ("p_oom", 0.004, "<1 %", None, None), ("p_oom", 0.123, "12 %", None, None),
        ("mfu", 0.4321, "43.2 %", None, None), ("tokens_per_s_per_gpu", 12345.6, "12,346", "12,346", None),
    ],
)  # fmt: skip
def test_the_home_makes_the_texts(name, value, text, bare_text, bare_heading):
    column = column_of(name)
    assert column.text(value) == text
    assert bare_text in (None, column.unit.bare_text(value))
    assert bare_heading in (None, column.bare_heading)
