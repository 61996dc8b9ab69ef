"""Units, directions and formats of columns stand in the homes of columns alone; all else asks a column for them."""

import ast
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from ultrabench import column as column_module
from ultrabench.analysis.results.columns import RESULT_TABLE, column_of
from ultrabench.column import GPU_HOURS, MILLISECONDS, NUMBER, Better, ColumnType, Form, Source, Unit
from ultrabench.result import RESULT_COLUMNS
from ultrabench.sweep.predict.predict import PREDICTION_COLUMNS

ROOT = Path(__file__).parents[3]
ROOMS = ("src/ultrabench", "sweep", "launchers", "agent", "kernel", "analysis")
HOMES = {"src/ultrabench/column.py", "analysis/results/columns.py", "analysis/page/columns.js"}
EXCEPTIONS = {
    "agent/diagnose/families.py": "units in lines of libraries",
    "agent/diagnose/findings.py": "units in lines of libraries",
    "agent/health_sources.py": "GiB of a check, in a process that imports little, to start fast",
    "analysis/results/imported/units.py": "units in tables of other programs",
    "src/ultrabench/log_patterns.py": "an MFU above 1 as a fraction, since a group that is in percent causes it",
    "src/ultrabench/quantity.py": "units that a user may write behind a setting",
    "sweep/recommend.py": "a P(OOM) beside the limit max_p_oom, which a user sets as a plain number",
    "sweep/running/outliers.py": "an impossible MFU as a factor of the peak, since 162,853 % says less",
}
"""File -> why it has a unit or a format of its own."""
COLUMNS = {**RESULT_TABLE, **PREDICTION_COLUMNS, **RESULT_COLUMNS}
"""Name of a column, or of the field that describes it -> the column."""
MEASURES = {name: column for name, column in COLUMNS.items() if column.unit != NUMBER}
NUMBERS = MEASURES | {
    name: column
    for name, column in COLUMNS.items()
    if column.type == ColumnType.FLOAT and column.source != Source.RUN
}
"""Columns whose numbers have a format; what a user set is repeated as it was given."""
HEADINGS = {column.heading for column in MEASURES.values() if column.title} - {GPU_HOURS.symbol}
"""Names of columns for people, such as tokens/s/GPU; words of English are not among them."""
BARE_HEADINGS = {c.bare_heading for c in MEASURES.values() if c.unit.axis_symbol and c.short} | HEADINGS
SYMBOLS = {
    symbol
    for unit in {column.unit for column in MEASURES.values()}
    for symbol in (unit.symbol, unit.axis_symbol, unit.short)
    if symbol not in ("", "s", "fraction", "%", "% of peak", "W", "J", "B", GPU_HOURS.symbol)
} | {"MiB"}
"""Symbols of units that no word of English contains."""
SYMBOL = re.compile("|".join(rf"(?<![\w/]){re.escape(symbol)}(?![\w/])" for symbol in sorted(SYMBOLS)))
RATE = re.compile("|".join(map(re.escape, sorted(symbol for symbol in SYMBOLS if "/s" in symbol))))
SCALES = {100, 1e3, 1e6, 1e9, 1e12, 2**10, 2**20, 2**30, 1024}
DIRECTIONS = {str(better) for better in Better if better != Better.NONE}
DIRECTION = re.compile(rf"\b(?:{'|'.join(sorted(DIRECTIONS))}) is better\b")
AGGREGATES = {"abs", "astype", "float", "fmean", "max", "mean", "median", "min", "round", "sorted", "sum"}
"""Functions and methods whose result has the unit of their argument."""
UNITS = {name: unit for name, unit in vars(column_module).items() if isinstance(unit, Unit)}
"""Name of a constant -> the unit."""
PRECISION = re.compile(r"\.\d+[efg]$")
"""The end of a format that rounds, as that of a measured number does."""
WRITTEN_SYMBOL = re.compile(
    rf" (?:{'|'.join(map(re.escape, sorted(SYMBOLS | {'KiB', 'ms', 'TFLOP'})))})(?!\w)"
)
"""The symbol of a unit behind a number."""
RATE_NAME = re.compile(r"(?:^|_)rates?$")
FORMAT = re.compile(r"\{\w*:[^}]+\}")
"""A template of `str.format` that formats a number."""


ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)


def first(names):
    return next(filter(None, names), None)


def is_scale(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        parts = [part.value for part in (node.left, node.right) if isinstance(part, ast.Constant)]
        return len(parts) == 2 and parts[0] ** parts[1] in SCALES
    value = node.value if isinstance(node, ast.Constant) else None
    return value in SCALES or (isinstance(node, ast.Name) and node.id in ("GIB", "unit_bytes"))


def is_binary_scale(node):
    return is_scale(node) and not (isinstance(node, ast.Constant) and node.value != 1024)


def rounds(spec):
    """Whether a format rounds to some digits."""
    end = spec.values[-1] if spec and spec.values else None
    return isinstance(end, ast.Constant) and PRECISION.search(end.value) is not None


class Scope:
    """A function, or a module outside its functions, and which of its local names hold numbers of a column."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self.nodes = nodes
        self.column_by_name: dict[str, str] = {}
        self.value_by_name: dict[str, ast.AST] = {}
        for _ in range(2):  # a name may follow from a name that is assigned below it, in a loop
            for target, value in self._assignments():
                if not isinstance(target, ast.Name):
                    continue
                self.value_by_name[target.id] = value
                if name := self.column_in(value):
                    self.column_by_name[target.id] = name

    def _assignments(self) -> Iterator[tuple[ast.AST, ast.AST]]:
        for node in (node for node in self.nodes if isinstance(node, ASSIGNMENTS)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            for target in filter(None, targets if value else ()):
                yield target, value
                values = value.elts if isinstance(value, ast.Tuple) else ()
                yield from zip(getattr(target, "elts", ()), values, strict=False)

    def column_in(self, node):
        """The column whose number an expression is, as a name, an attribute, a key or what follows; else None."""
        match node:
            case ast.Name():
                return self.column_by_name.get(node.id) or (node.id if node.id in NUMBERS else None)
            case ast.Attribute():
                return node.attr if node.attr in NUMBERS else None
            case ast.Subscript():
                keys = getattr(node.slice, "values", None) or getattr(node.slice, "elts", None)
                key = keys[-1] if keys else node.slice
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    return key.value if key.value in NUMBERS else None
                return self.column_in(node.value)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]):
                return key if key in NUMBERS else None
            case ast.Call(func=ast.Name(id=name)):
                return first(map(self.column_in, node.args)) if name in AGGREGATES else None
            case ast.Call(func=ast.Attribute(attr=name, value=series)):
                return self.column_in(series) if name in AGGREGATES else None
            case ast.BinOp(left=left, right=right, op=ast.Mult() | ast.Div()):
                scaled = left if is_scale(right) else right if is_scale(left) else None
                return scaled and self.column_in(scaled)
            case ast.BinOp(left=left, right=right):
                return self.column_in(left) or self.column_in(right)
            case ast.BoolOp() | ast.Tuple() | ast.List():
                return first(map(self.column_in, getattr(node, "values", None) or getattr(node, "elts", ())))
            case ast.IfExp():
                return self.column_in(node.body) or self.column_in(node.orelse)
            case ast.NamedExpr():
                return self.column_in(node.value)
            case ast.UnaryOp():
                return self.column_in(node.operand)
            case ast.ListComp() | ast.GeneratorExp():
                return self.column_in(node.elt)

    def formats(self) -> Iterator[tuple[int, str]]:
        """(line, reason) of each number of a column that is formatted, scaled or followed by its unit by hand."""
        for node in self.nodes:
            match node:
                case ast.FormattedValue(value=value, format_spec=ast.AST()) if name := self.column_in(value):
                    yield node.lineno, f"format of {name}"
                case ast.FormattedValue(value=value, format_spec=ast.AST() as spec) if rounds(spec):
                    if name := self._measured_name(value):
                        yield node.lineno, f"format of {name}"
                case ast.Call(func=ast.Attribute(value=ast.Name(id=unit), attr=method), args=[value, *_]) if (
                    unit in UNITS and method.endswith("text")
                ):
                    if (name := self.column_in(value)) and NUMBERS[name].unit != UNITS[unit]:
                        yield node.lineno, f"unit {unit} of {name}"
                case ast.Call(func=function, args=args):
                    templates = [part for part in (function, *args) if self._is_format(part)]
                    owner = function.value if isinstance(function, ast.Attribute) else None
                    if templates and (name := first(map(self.column_in, filter(None, (owner, *args))))):
                        yield node.lineno, f"format of {name}"
                case ast.BinOp(right=divisor, op=ast.Div()) if is_binary_scale(divisor):
                    yield node.lineno, "unit of bytes"
                case ast.BinOp(left=left, right=right, op=ast.Mult() | ast.Div()):
                    for operand, factor in ((left, right), (right, left)):
                        if is_scale(factor) and (name := self.column_in(operand) or bytes_in(operand)):
                            yield node.lineno, f"unit of {name}"
                case ast.JoinedStr(values=parts):
                    for part, text in pairwise(parts):
                        if isinstance(part, ast.FormattedValue) and isinstance(text, ast.Constant):
                            yield from self._written_units(part, text)
                            if rounds(part.format_spec) and WRITTEN_SYMBOL.match(text.value):
                                yield part.lineno, f"unit in {text.value!r}"

    def _measured_name(self, node):
        """What a rounded number is, if its name or a factor says that it is measured; None for other numbers."""
        match node:
            case ast.BinOp(left=left, right=right, op=ast.Mult()):
                names = {getattr(part, "id", "") for part in (left, right)}
                return first(sorted(names & {"factor", "scale"})) or first(
                    map(self._measured_name, (left, right))
                )
            case ast.Subscript(slice=ast.Name(id="column")):
                return "a column"
            case ast.Subscript(value=value):
                return self._measured_name(value)
            case ast.Call(func=ast.Name(id=name), args=args) if name in AGGREGATES:
                return first(map(self._measured_name, args))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                value = self.value_by_name.get(name)
                if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name):
                    return self._measured_name(value)
                is_measured = name.endswith(("_bytes", "_gib", "_mib", "times_s")) or RATE_NAME.search(name)
                return name if is_measured else None

    @staticmethod
    def _is_format(node):
        is_template = isinstance(node, ast.Attribute) and node.attr == "format"
        text = node.value.value if is_template and isinstance(node.value, ast.Constant) else None
        return isinstance(text, str) and FORMAT.search(text) is not None

    def _written_units(self, part, text) -> Iterator[tuple[int, str]]:
        """The unit of a column behind a text that is made of its number."""
        names = filter(None, map(self.column_in, ast.walk(part.value)))
        for name in names:
            unit = NUMBERS[name].unit
            for symbol in {unit.symbol, unit.axis_symbol, unit.short} - {"", "fraction"}:
                if re.match(rf" {re.escape(symbol)}(?!\w)", text.value):
                    yield part.lineno, f"unit behind {name}"


def bytes_in(node):
    """The name of a number of bytes that an expression is; None for other expressions."""
    name = getattr(node, "id", None) or getattr(node, "attr", None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    return name if name and name.endswith("bytes") else None


def texts_of(nodes):
    """Those nodes of a tree that are texts, but no docstring, and do not describe a column."""
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("column", "Column"):
            skipped |= {id(part) for part in ast.walk(node)}
    constants = (node for node in nodes if isinstance(node, ast.Constant))
    return [node for node in constants if isinstance(node.value, str) and id(node) not in skipped]


def own_texts(text):
    """(line, reason) of each text of a Python module that has a unit, a direction or a format of a column."""
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    nodes_by_function = [[*ast.walk(function)] for function in functions]
    inner_ids = {id(node) for function_nodes in nodes_by_function for node in function_nodes}
    for scope in map(Scope, [*nodes_by_function, [node for node in nodes if id(node) not in inner_ids]]):
        yield from scope.formats()
    for constant in texts_of(nodes):
        if constant.value.removeprefix(">") in BARE_HEADINGS:
            yield constant.lineno, f"heading {constant.value}"
        if constant.value in DIRECTIONS or DIRECTION.search(constant.value):
            yield constant.lineno, f"direction {constant.value}"
        if RATE.search(constant.value):
            yield constant.lineno, f"unit in {constant.value!r}"
        if id(constant) not in inner_ids and SYMBOL.search(constant.value):
            yield constant.lineno, f"unit in {constant.value!r}"
    for function_nodes in nodes_by_function:
        constants = texts_of(function_nodes)
        keys = {constant.value for constant in constants}
        attributes = {node.attr for node in function_nodes if isinstance(node, ast.Attribute)}
        shown_units = {MEASURES[name].unit for name in (keys | attributes) & MEASURES.keys()}
        shown_symbols = set(chain(*((u.symbol, u.axis_symbol, u.short) for u in shown_units)))
        for constant in constants:
            if shown_symbols & {*SYMBOL.findall(constant.value)}:
                yield constant.lineno, f"unit in {constant.value!r}"


def own_texts_of_script(text):
    """(line, reason) of each line of a script that has a unit or a heading of a column, makes GiB, or rounds."""
    shown_words = sorted(SYMBOLS | HEADINGS | {GPU_HOURS.symbol})
    words = re.compile("|".join(rf"(?<![\w/]){re.escape(word)}(?![\w/])" for word in shown_words))
    for line_no, line in enumerate(text.splitlines(), start=1):
        code = line.partition("//")[0]
        has_format = re.search(r"\.to(?:Precision|Fixed)\(|\b100 \*|\} %", code)
        is_shown = has_format and "style:" not in code and "width:" not in code
        if words.search(code) or "GIB" in code or "2 ** 30" in code or is_shown:
            yield line_no, line.strip()


def test_no_module_has_a_unit_a_direction_or_a_format_of_a_column():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.parent.is_symlink()]
    texts_by_file = {
        name: texts
        for path in paths
        if (name := str(path.relative_to(ROOT))) not in HOMES
        if (texts := sorted({*own_texts(path.read_text())}))
    }
    assert texts_by_file.keys() == EXCEPTIONS.keys(), {
        name: texts for name, texts in texts_by_file.items() if name not in EXCEPTIONS
    }


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
        "shown = 100 * cell.mfu", "peak_gib = prediction.peak_mem_bytes / 2**30", "gib = free_bytes / GIB",
        "def head():\n    return '>tokens/s/GPU'", "def head():\n    return f'{rate:,.0f} tokens/s'",
        "def peak(row):\n    return f'{size(row[\"predicted_peak_mem_bytes\"])} GiB'",
        "def rank():\n    return 'lower'", "def title(name):\n    return f'{name} (lower is better)'",
        "def text(result):\n    load = result.foreign_load or 0.0\n    return f'{load:.0%}'",
        "def text(row):\n    if (loss := row.get('loss_final')) is not None:\n        return f'{loss:.6f}'",
        "def text(rows):\n    return [f'{s:.3g}' for s in (row['duration_s'] for row in rows)]",
        "def text(price):\n    return f'{three_digits(price.gpu_hours)} GPU hours'",
        "def text(run):\n    low, high = run.p_oom, 1\n    return f'{100 * low:.0f} %'",
        "def texts(frame):\n    return frame['source_mfu'].map('{:.4g}'.format)",
        "FIRST = ('run', 'MFU', 'peak GiB')", "LOOK = {'label': 'area: tokens/s of all GPUs'}",
        "NOTE = 'step_time_s (lower is better)'",
        "def peaks(runs):\n    return runs[['peak_mem_bytes', 'predicted_peak_mem_bytes']].astype(float) / GIB",
        "def part(size, factor):\n    return f'{size * factor:.2f}'", "def ram(pages):\n    return pages / 2**30",
        "def note(times_s):\n    return f'median {median(times_s):.4g} s a step'",
        "def loss(row, column):\n    expected = row[column]\n    return f'{expected:.6f}'",
        "def first(series):\n    return f'{series.rates[0]:,.4g}'",
        "def chance(run):\n    return NUMBER.bare_text(run.p_oom)", "def work(n):\n    return f'{n / 1e12:.4g} TFLOP'",
    ],
)  # fmt: skip
def test_a_text_made_by_hand_is_seen(text):
    assert [*own_texts(text)]


def test_texts_of_a_column_are_not_seen():
    assert not [
        *own_texts(
            "text = column_of('mfu').text(row['mfu'])\nspeed = column('Rate in B/s.', unit=BYTES_PER_S)"
        ),
        *own_texts("def f(row):\n    'Bytes in GiB.'\n    return row['step_time_s'] / 2"),
        *own_texts("def f(path):\n    return f'{path}: skipped a line of more than {n} MiB'"),
        *own_texts("def f(a, b):\n    ratio = a.step_time_s / b.step_time_s\n    return f'{ratio:.2f} x'"),
        *own_texts("def f(shape):\n    return f'{shape.partial_rotary_factor:g}'"),
    ]


def test_a_unit_in_a_script_is_seen():
    lines = ("const name = 'tokens/s/GPU';", "text = `${x} GiB`;", "title = 'MFU';", "bytes / 2 ** 30")
    lines += ("hours.toPrecision(3)", "100 * mfu", "`to ${pageData.mfu_end} %`")
    for line in (*lines, "head = ['status', 'GPU hours'];"):
        assert [*own_texts_of_script(line)], line
    assert not [*own_texts_of_script("const name = headingOf(RATE); // tokens/s/GPU")]


@pytest.mark.parametrize(
    ("name", "value", "text", "bare_text", "bare_heading"),
    [
        ("predicted_peak_mem_bytes", 26_306_674_688, "24.5 GiB", "24.5", "peak GiB"),
        ("step_time_s", 2.3456, "2.346 s", "2.35", "step s"), ("step_time_s", 1234.5, "1234 s", "1,234", "step s"),
        ("p_oom", 0.004, "<1 %", None, None), ("p_oom", 0.123, "12 %", None, None),
        ("mfu", 0.4321, "43.2 %", None, None),
        ("tokens_per_s_per_gpu", 12345.6, "12,346", "12,346", "tokens/s/GPU"),
        ("gpu_hours", 12.3456, "12.35 GPU hours", "12.3", "GPU hours"),
    ],
)  # fmt: skip
def test_the_home_makes_the_texts(name, value, text, bare_text, bare_heading):
    column = column_of(name)
    assert column.text(value) == text
    assert bare_text in (None, column.unit.bare_text(value))
    assert bare_heading in (None, column.bare_heading)


@pytest.mark.parametrize("form", Form)
def test_a_factor_serves_all_texts_and_figures(form):
    unit = Unit("s", form, MILLISECONDS)
    assert (unit.drawn(0.25), unit.axis_symbol, unit.brief_text(0.25)) == (
        250,
        "ms",
        "250.0 ms" if form == Form.MEMORY else "250 ms",
    )
    assert (unit.exact_text(0.2501234), MILLISECONDS.text(0.25)) == ("250.123 ms", "250.00 ms")
    if form in (Form.PLAIN, Form.GROUPED):
        assert unit.text(0.25) == {Form.PLAIN: "250 ms", Form.GROUPED: "250"}[form]
