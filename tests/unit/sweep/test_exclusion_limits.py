"""How many nodes are excluded, and which never are."""

from dataclasses import replace

import pytest

from tests.unit.allocations import CONFIG
from ultrabench.errors import ConfigError
from ultrabench.sweep.running.blame import decide_blame

REPORTED = {f"gpu0{number}": "its agent reported it" for number in range(1, 6)}


def blame_with(**changes):
    return decide_blame([], [], REPORTED, replace(CONFIG.retry, **changes))


def test_nodes_beyond_the_limit_are_named():
    blame = blame_with(max_excluded=3)
    assert ([*blame.excluded], blame.over_limit) == (["gpu01", "gpu02", "gpu03"], ("gpu04", "gpu05"))
    assert blame_with(max_excluded=5).over_limit == ()


def test_ranges_of_nodes_are_forgiven():
    assert [*blame_with(forgive=("gpu[01-03]", "gpu05")).excluded] == ["gpu04"]
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        replace(CONFIG.retry, forgive=("gpu[01-",))
