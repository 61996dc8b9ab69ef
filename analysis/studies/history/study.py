"""The command of this study."""

from ultrabench.analysis.study import Command

COMMANDS = (
    Command(
        name="history",
        after="plot",
        help="""Show how the speed of runs changed from night to night.

        The exit code is 1 if the latest significant change of a run is a loss of more than --fail-above.""",
    ),
)
