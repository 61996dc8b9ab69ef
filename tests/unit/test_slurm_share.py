from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.allocations import with_launcher
from ultrabench.errors import ConfigError
from ultrabench.launchers.choose import PARTITION_DIVISOR, node_share
from ultrabench.launchers.slurm.site import Limits

HOPPER = Limits(name="hopper", total_nodes=16)


def wanting(*nodes, **launcher):
    config = with_launcher(**launcher)
    return replace(config, axes=replace(config.axes, nodes=nodes))


@pytest.mark.parametrize(
    ("nodes", "asked", "limits", "share"),
    [
        ((1,), None, {}, 4),
        ((1, 4), None, {}, 4),
        ((1,), None, {"total_nodes": 1}, 1),
        ((1, 8), 8, {}, 8),
        ((1, 8), 64, {}, 64),
        ((1,), None, {"max_nodes_per_user": 2}, 2),
        ((2,), 8, {"max_nodes_per_user": 2}, 2),
        ((8,), 8, {"max_nodes": 8}, 8),
        ((4,), None, {"max_nodes": 4, "max_nodes_per_user": 100}, 4),
    ],
)
def test_what_a_sweep_may_hold(nodes, asked, limits, share):
    assert node_share(wanting(*nodes, max_nodes=asked), replace(HOPPER, **limits)) == share


@pytest.mark.parametrize(
    ("nodes", "asked", "limits", "words"),
    [
        ((1, 8), None, {}, ["sweep.nodes up to 8", "has 16 nodes", "takes 4", "set launcher.max_nodes=8"]),
        ((1, 8), 6, {}, ["launcher.max_nodes=6", "set launcher.max_nodes=8"]),
        ((32,), None, {}, ["sweep.nodes up to 32", "hopper has 16 nodes", "leave out what is larger"]),
        ((8,), 8, {"max_nodes": 4}, ["gives a job 4", "leave out what is larger"]),
        ((8,), None, {"max_nodes_per_user": 4}, ["a user 4 at a time", "leave out what is larger"]),
        ((32,), 64, {"max_nodes": 64}, ["has 16 nodes", "leave out what is larger"]),
        ((1,), None, {"total_nodes": 0}, ["has 0 nodes", "leave out what is larger"]),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_is_submitted(nodes, asked, limits, words):
    with pytest.raises(ConfigError) as caught:
        node_share(wanting(*nodes, max_nodes=asked), replace(HOPPER, **limits))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


SOME = st.none() | st.integers(1, 40)


@given(
    nodes=st.sets(st.integers(1, 40), min_size=1), asked=SOME, total=st.integers(1, 40), most=SOME, user=SOME
)
def test_every_size_of_a_sweep_can_be_submitted(nodes, asked, total, most, user):
    """Otherwise a launch would wait for ever."""
    limits = replace(HOPPER, total_nodes=total, max_nodes=most, max_nodes_per_user=user)
    possible = max(nodes) <= min(n for n in (total, most, user) if n is not None)
    try:
        share = node_share(wanting(*nodes, max_nodes=asked), limits)
    except ConfigError:
        assert not possible or max(nodes) > (asked or max(1, total // PARTITION_DIVISOR))
        return
    assert possible
    assert max(nodes) <= share
    assert user is None or share <= user


@pytest.mark.parametrize(
    ("limits", "most"),
    [({}, None), ({"max_time_minutes": 60}, 60), ({"max_wall_minutes": 30}, 30),
     ({"max_time_minutes": 60, "max_wall_minutes": 30}, 30), ({"max_time_minutes": 60, "max_wall_minutes": 90}, 60)],
)  # fmt: skip
def test_the_longest_time_of_a_job(limits, most):
    assert replace(HOPPER, **limits).job_minutes == most
