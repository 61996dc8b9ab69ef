"""The command of this study."""

from ultrabench.analysis.study import Command

COMMANDS = (
    Command(
        name="export",
        after="report",
        help="""Export runs to CSV, W&B, MLflow or TensorBoard.

        A repeated export updates the runs.""",
    ),
)
