"""The options of `ultrabench recommend`."""

from typing import Annotated

from ultrabench.allowed import Count, NonNegative, at_least
from ultrabench.cli.options import (
    AllSimilar,
    Force,
    Json,
    Overrides,
    WriteSweep,
    number_option,
    require_write,
)
from ultrabench.errors import ConfigError

_TOKENS_HELP = "Training tokens, such as 15e12; adds the training days."
_PRICE_HELP = "Price per GPU hour (default: from the cluster's file); adds the cost of --tokens."
Tokens = Annotated[float | None, number_option("--tokens", Annotated[float, at_least(1.0)], _TOKENS_HELP)]
PricePerGpuHour = Annotated[float | None, number_option("--price-per-gpu-hour", NonNegative, _PRICE_HELP)]
Top = Annotated[int, number_option("--top", Count, "Show the K best groups of similar layouts per cell.")]


def recommend(
    overrides: Overrides,
    tokens: Tokens = None,
    price_per_gpu_hour: PricePerGpuHour = None,
    top: Top = 1,
    all_: AllSimilar = False,
    write: WriteSweep = None,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Recommend the best predicted layout per model and node count.

    It runs nothing and needs no GPU. It takes the overrides of sweep plan, and short ones: nodes=[1,2,8]
    seq_len=8192 gbs=1024 tp=8. The default is sweep=recommend, with fp8 if the hardware supports it.
    """
    if price_per_gpu_hour is not None and tokens is None:
        raise ConfigError("--price-per-gpu-hour needs --tokens; add them, such as --tokens 15e12")
    require_write(write, force=force)
    from ultrabench.cli.run_recommend import run_recommend

    run_recommend(overrides, tokens, price_per_gpu_hour, top, all_, json_, write, force=force)
