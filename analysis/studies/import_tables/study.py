"""The command of this study."""

from ultrabench.analysis.study import Command

COMMANDS = (
    Command(
        name="import",
        after="collect",
        help="Convert the result table of another program to a parquet file.",
        function="import_table",
    ),
)
