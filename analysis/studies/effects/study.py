"""The command and the figure of this study."""

from ultrabench.analysis.study import Command, Kind

COMMANDS = (
    Command(
        name="effects",
        group="sweep",
        after="top",
        help="""Show the effect of each value of each axis, all else equal.

        It compares runs that differ in one axis only. The axis with the largest significant effect comes first.""",
    ),
)
KIND = Kind(
    name="effect",
    after="scaling",
    summary="speedup by each value of an axis, all else equal: effect AXIS",
    takes_any_axis=True,
)
