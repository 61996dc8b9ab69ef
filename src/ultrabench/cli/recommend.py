"""The options of `ultrabench recommend`."""

import typer

from ultrabench.cli.options import Json, Overrides
from ultrabench.errors import ConfigError


def recommend(
    overrides: Overrides,
    tokens: float | None = typer.Option(
        None, min=1.0, help="Training tokens, such as 15e12; adds the training days."
    ),
    price_per_gpu_hour: float | None = typer.Option(
        None,
        min=0.0,
        help="Price per GPU hour (default: from the cluster's file); adds the cost of --tokens.",
    ),
    top: int = typer.Option(1, min=1, help="Show the K best layouts per cell."),
    json_: Json = False,
) -> None:
    """Recommend the best predicted layout per model and node count.

    It runs nothing and needs no GPU. It takes the overrides of sweep plan, and short ones: nodes=[1,2,8]
    seq_len=8192 gbs=1024 tp=8. The default is sweep=recommend, with fp8 if the hardware supports it.
    """
    if price_per_gpu_hour is not None and tokens is None:
        raise ConfigError("--price-per-gpu-hour needs --tokens; add them, such as --tokens 15e12")
    from ultrabench.cli.run_recommend import run_recommend

    run_recommend(overrides, tokens, price_per_gpu_hour, top, json_)
