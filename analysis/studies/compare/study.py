"""The command of this study."""

from ultrabench.analysis.study import Command

COMMANDS = (
    Command(
        name="compare",
        after="plot",
        help="""Compare results B with A: show slower and failing layouts.

        B can be the word `published`, which compares the best runs of A with published rates.

        The exit code is 1 if a layout is significantly slower than the threshold allows, or fails only in B.""",
    ),
)
