"""The section of the page with the speed and the failures of each node."""

import pyarrow as pa

from ultrabench.analysis.page.section import Section
from ultrabench.analysis.results.ranking import Ranking
from ultrabench.analysis.studies.nodes.measurements import table_rows
from ultrabench.analysis.studies.nodes.nodes import reports
from ultrabench.analysis.studies.nodes.table import HEADS, NOTE, cells, slowdowns_text
from ultrabench.device_rates import NODE_RATES

RANKING_COLUMNS = ()
"""The columns that this section reads beside those of a ranking."""


def section(ranking: Ranking, table: pa.Table, *, public: bool) -> Section | None:
    """The nodes as the command shows them; None on a public page, or if no preflight measured a node."""
    is_unknown = all(table[name].null_count == len(table) for name in NODE_RATES)
    node_reports = [] if public or is_unknown else reports(table_rows(table))
    if not node_reports:
        return None
    return Section(
        title="Nodes",
        caption="Slow and failing nodes first",
        heads=[head.removeprefix(">") for head in HEADS],
        rows=[["" if value is None else str(value) for value in cells(report)] for report in node_reports],
        notes=[f"{NOTE} {slowdowns_text(node_reports)}"],
    )
