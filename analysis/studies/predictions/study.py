"""The commands and the figure of this study."""

from ultrabench.analysis.study import Command, Kind

COMMANDS = (
    Command(
        name="validate",
        group="predict",
        after="layout",
        help="Compare predictions with measured runs; -o draws a figure.",
    ),
    Command(
        name="calibrate",
        group="predict",
        after="layout",
        help="""Fit a profile to measured runs.

        It shows the errors on runs that were left out of the fit, and the runs that would teach most next.""",
    ),
)
KIND = Kind(
    name="predicted", after="pareto", summary="predicted against measured step time and memory of each run"
)
