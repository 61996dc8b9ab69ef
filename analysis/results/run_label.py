"""The short text by which tables and messages name the run of a row."""

from ultrabench.analysis.results.options import variant_in
from ultrabench.analysis.results.rows import Row
from ultrabench.layout import labels
from ultrabench.variant import option_texts


def run_label(row: Row) -> str:
    """The layout of a row and its `options` as a short text; of a row without that key, its variant."""
    options = row["options"] if "options" in row else variant_in(row["variant"])
    return " ".join((*labels(row), *option_texts(options)))
