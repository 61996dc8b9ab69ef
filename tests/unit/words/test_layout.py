from itertools import product

import pytest
from hypothesis import given
from hypothesis.strategies import permutations, sampled_from

from tests.configs import refused
from tests.strategies import layouts
from ultrabench.layout import RANK_ORDER, Layout, crosses_nodes, details_of, ranks_in_node


@given(layouts(most=5))
def test_ranks_and_coordinates_are_a_bijection(layout):
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert sorted(places) == places
    assert [layout.first_rank(pp) for pp in range(layout.pp)] == [
        places.index((pp, 0, 0, 0)) for pp in range(layout.pp)
    ]
    degrees = (layout.pp, layout.dp, layout.cp, layout.tp)
    assert all(0 <= n < degree for place in places for n, degree in zip(place, degrees, strict=True))


def test_the_order_of_axes_is_pp_dp_cp_tp_so_that_a_tp_group_stays_on_a_node():
    layout = Layout(dp=2, tp=2, pp=2, cp=2, gas=2, pp_schedule="1f1b")
    places = [layout.coordinates(rank) for rank in (1, 2, 4, 8)]
    assert places == [(0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)]


@given(layouts(most=5), permutations(RANK_ORDER), sampled_from([1, 2, 3, 4, 8]))
def test_the_ranks_of_a_group_on_a_node_follow_from_the_order_in_which_ranks_are_numbered(
    layout, order, node_size
):
    places = [layout.coordinates(rank, order) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    for degrees in ({"dp", "cp"}, {"tp"}, {"pp"}):
        others = [n for n, degree in enumerate(places[0]._fields) if degree not in degrees]
        group = [rank for rank, place in enumerate(places) if all(place[n] == 0 for n in others)]
        axes = layout.group_axes(*degrees, rank_order=order)
        assert sorted(sum(n * stride for n, (_, stride) in zip(place, axes, strict=True))
                      for place in product(*(range(size) for size, _ in axes))) == group  # fmt: skip
        if all(stride % node_size == 0 or node_size % (size * stride) == 0 for size, stride in axes):
            assert ranks_in_node(axes, node_size) == sum(rank < node_size for rank in group)
            assert crosses_nodes(axes, node_size) == (group[-1] >= node_size)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_has_no_coordinates(rank):
    with refused(f"rank={rank}; must be in 0..3"):
        Layout(dp=4).coordinates(rank)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(({name: 0}, f"{name}=0; must be >= 1") for name in ("dp", "tp", "pp", "cp", "mbs", "gas", "virtual_stages")),
        ({"zero_stage": 4}, "zero_stage=4; must be 0 to 3"),
        ({"zero_stage": -1}, "zero_stage=-1; must be 0 to 3"),
        ({"pp_schedule": "gpipe"}, "pp_schedule='gpipe'; must be none, 1f1b, afab, interleaved or zbv"),
        ({"pp": 2}, "pp_schedule='none' with pp=2; pp=1 needs pp_schedule=none, pp > 1 another schedule"),
        ({"pp_schedule": "1f1b"}, "pp_schedule='1f1b' with pp=1; pp=1 needs pp_schedule=none, pp > 1 another schedule"),
        ({"virtual_stages": 2}, "with pp_schedule=none; must be 1 (interleaved: >= 2, zbv: 2)"),
        ({"pp": 2, "pp_schedule": "zbv", "virtual_stages": 3}, "virtual_stages=3 with pp_schedule=zbv; must"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words, line):
    with refused(line):
        Layout(**{"dp": 1, **words})


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        (Layout(dp=4, mbs=2, gas=8), "dp4 tp1 pp1 z0 mbs2 gas8"),
        (Layout(dp=1, tp=2, pp=4, cp=2, zero_stage=1, pp_schedule="afab"), "dp1 tp2 pp4 cp2 z1 mbs1 gas1 afab"),
        (Layout(dp=1, pp=2, gas=2, pp_schedule="1f1b"), "dp1 tp1 pp2 z0 mbs1 gas2"),
        (Layout(dp=1, recompute="every2"), "dp1 tp1 pp1 z0 mbs1 gas1 recompute-every2"),
    ],
)  # fmt: skip
def test_label(layout, label):
    assert layout.label() == label


def test_a_detail_has_no_effect_at_the_neutral_value_of_its_axis():
    assert details_of("pp") == ("pp_schedule", "pp_layout", "virtual_stages")
    assert details_of("zero_stage") == ("dp_shard",)
    assert details_of("mbs") == ()
