"""Scopes of rates: a table may give the tokens/s or FLOP/s of one GPU, of a node, of a DP rank,
or of all GPUs together.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ultrabench.errors import counted
from ultrabench.layout import DEGREES

SCOPE_TEXTS = {"all": "of all GPUs", "gpu": "per GPU", "node": "per node", "dp_rank": "per DP rank"}
"""Name of a scope in a map -> its text in messages."""
SCOPED_COLUMNS = ("tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu")
"""Columns of results with rates of GPUs."""


def is_of_one_gpu(column: str) -> bool:
    """Whether a column of rates is that of one GPU, not of all."""
    return column.endswith("_per_gpu")


def gpus_in_scope(frame: pd.DataFrame, scope: str) -> pd.Series:
    """For each row the number of GPUs whose rates together are one of this scope; null if it is unknown.

    A DP rank has gpus / dp GPUs; where one of them is unknown, the product of the other degrees, unknown ones as 1.
    """
    if scope == "gpu":
        return pd.Series(1.0, frame.index)
    if scope == "all":
        return frame["gpus"].astype(float)
    if scope == "node":
        return (frame["gpus"] / frame["nodes"]).astype(float)
    other_degrees = frame[[degree for degree in DEGREES if degree != "dp"]]
    product = other_degrees.fillna(1).prod(axis=1).where(other_degrees.notna().any(axis=1))
    return (frame["gpus"] / frame["dp"]).astype(float).fillna(product)


def convert_scopes(
    frame: pd.DataFrame, scope_by_column: Mapping[str, str], half_digits: Mapping[str, pd.Series]
) -> tuple[dict[str, pd.Series], list[str]]:
    """Converts the rates of other scopes to those of their columns, in place; rates of unknown scopes become null.

    Returns the roundings of the digits after the conversion, and sentences about rows without a rate.
    """
    new_half_digits, notes = dict(half_digits), list[str]()
    for column, scope in scope_by_column.items():
        num_gpus = gpus_in_scope(frame, "gpu" if is_of_one_gpu(column) else "all")
        factors = (num_gpus / gpus_in_scope(frame, scope)).replace(np.inf, np.nan)
        if num_lost := int((frame[column].notna() & factors.isna()).sum()):
            fact = f"{column} is unknown in {counted(num_lost, 'row')}, since per: {scope} needs"
            notes.append(f"{fact} {'dp' if scope == 'dp_rank' else 'nodes'} and gpus")
        frame[column] *= factors
        if column in new_half_digits:
            new_half_digits[column] = new_half_digits[column] * factors
    return new_half_digits, notes
