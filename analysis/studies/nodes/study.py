"""The command and the figure of this study."""

from ultrabench.analysis.study import Command, Kind

COMMANDS = (
    Command(
        name="nodes",
        after="plot",
        help="""Show the nodes of all sweeps, slow and failing ones first.

        A node is marked if it was slower than the others on at least two days, by more than chance and the usual
        differences between nodes explain.""",
    ),
)
KIND = Kind(
    name="nodes", after="failures", summary="rates of each node over time, slow and failing nodes first"
)
