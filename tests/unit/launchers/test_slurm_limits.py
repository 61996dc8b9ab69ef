"""What scontrol, sinfo and sacctmgr of Slurm 22.05 printed, shortened, and what a sweep may hold of it."""

import getpass
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit.allocations import with_launcher
from tests.unit.launchers.site import ASSOCIATIONS, CONFIG, PARTITIONS, UNENFORCED
from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.choose import PARTITION_DIVISOR, node_share
from ultrabench.launchers.slurm.query import CommandError
from ultrabench.launchers.slurm.site import Limits, Partition, Site

NODES = """hopper|1|16|2000|down*|gpu:h100:8
hopper|3|16|2000|idle|gpu:h100:8
hopper|1|16|2000|mixed|gpu:h100:8
hopper|1|16|2000|drained|gpu:h100:8
hopper|2|64|515000|idle~|gpu:a100:4(S:0-1),gpu:v100:2(S:0)
debug|2|16|2000|maint|(null)
"""
QOSES = {
    "part": "part||||1-00:00:00|node=6||node=5",
    "short": "short|DenyOnLimit|3|20|00:30:00|gres/gpu=16|gres/gpu=24,node=4|",
    "strong": "strong|DenyOnLimit,OverPartQOS|||UNLIMITED|node=1||",
    "normal": "normal|||||||",
    "other": "other|||||||",
}


class Programs:
    """Answers for the programs; the words that sacctmgr was given stay in `asked`."""

    def __init__(self, **changed):
        self.texts = {
            "config": CONFIG, "partition": PARTITIONS, "sinfo": NODES, "assoc": ASSOCIATIONS, "user": "research\n",
        } | changed  # fmt: skip
        self.asked = []

    def __call__(self, *words):
        self.asked += words if words[0] == "sacctmgr" else ()
        if "qos" in words:
            names = words[6].removeprefix("name=").split(",")
            # In its own order, not in that of the question.
            return "".join(f"{QOSES[name]}\n" for name in sorted(QOSES, reverse=True) if name in names)
        text = next(text for kind, text in self.texts.items() if kind in words)
        if text is None:
            raise CommandError(f"{words[0]}: Unable to contact slurm controller (connect failure) (exit 1)")
        return text


def limits_of(partition=None, account=None, qos=None, *, ask):
    return Site(ask).limits(partition, account, qos)


def test_partitions_and_their_nodes():
    hopper = Partition(
        name="hopper", is_default=True, state="UP", total_nodes=8, up_nodes=6, cpus_per_node=16,
        mem_mb_per_node=2000, gpus_per_node=8, gres="gpu:h100:8", kinds=(
            "6 nodes of 16 CPUs, 2000 MB, gpu:h100:8",
            "2 nodes of 64 CPUs, 515000 MB, gpu:a100:4(S:0-1),gpu:v100:2(S:0)",
        ),
    )  # fmt: skip
    debug = Partition(
        name="debug", state="UP", total_nodes=2, up_nodes=0, max_nodes=2, max_time_minutes=30, partition_qos="part",
        cpus_per_node=16, mem_mb_per_node=2000, gpus_per_node=0, kinds=("2 nodes of 16 CPUs, 2000 MB, no gres",),
    )  # fmt: skip
    secret = Partition(name="secret", state="DOWN", total_nodes=8, max_time_minutes=3600)
    assert Site(Programs()).partitions == [hopper, debug, secret]
    limits = limits_of(ask=Programs())
    assert limits.name == "hopper"
    assert (limits.cluster, limits.accounting, limits.max_array_size) == ("alps", True, 101)


NONE = (None,) * 6


@pytest.mark.parametrize(
    ("said", "partition", "account", "qos", "limits"),
    [
        # max_nodes, max_nodes_per_user, max_submit, max_jobs, max_wall_minutes, job_minutes
        ({}, None, None, None, (2, 3, 20, 3, 30, 30)),
        ({}, "hopper", "Research", "short", (2, 3, 20, 3, 30, 30)),
        ({}, "hopper", "research", "normal", (None, None, 77, None, 120, 120)),
        ({}, "hopper", "root", None, NONE),
        ({}, "debug", None, None, (2, None, None, 5, 1440, 30)),
        ({}, "debug", None, "short", (2, 4, 20, 3, 1440, 30)),
        ({}, "debug", None, "strong", (1, None, None, 5, 1440, 30)),
        ({}, "secret", None, None, (None, 4, 20, 3, 30, 30)),
        ({}, "hopper", "nobody's", None, NONE),
        ({"sinfo": None}, None, None, None, (None, 4, 20, 3, 30, 30)),
        ({"assoc": None}, None, None, None, NONE),
        ({"config": UNENFORCED, "assoc": "not to be asked for"}, None, None, None, NONE),
    ],
)
def test_limits_of_qos_and_account(said, partition, account, qos, limits):
    """A source that fails leaves its values open; limits that are not enforced are not asked for."""
    programs = Programs(**said)
    found = limits_of(partition, account, qos, ask=programs)
    names = "max_nodes", "max_nodes_per_user", "max_submit", "max_jobs", "max_wall_minutes", "job_minutes"
    assert tuple(getattr(found, name) for name in names) == limits
    if said.get("config"):
        assert programs.asked == []
    else:
        assert {f"user={getpass.getuser()}", "cluster=alps"} <= set(programs.asked)


@pytest.mark.parametrize(("text", "by"), [("slurmdbd", "none"), ("associations,", "nojobs,associations,")])
def test_a_cluster_may_record_no_jobs(text, by):
    assert not limits_of(ask=Programs(config=CONFIG.replace(text, by))).accounting


@pytest.mark.parametrize(
    ("partition", "said", "error", "told"),
    [
        ("hoper", {}, ConfigError, r"launcher.partition 'hoper'; did you mean hopper\?"),
        (None, {"partition": PARTITIONS.replace("Default=YES", "Default=NO")}, ConfigError,
         r"set launcher.partition= \(hopper, debug, secret\)"),
        (None, {"config": None}, ClusterError, "connect failure.*login node"),
        (None, {"partition": None}, ClusterError, "connect failure.*login node"),
    ],
)  # fmt: skip
def test_a_partition_that_cannot_be_read(partition, said, error, told):
    with pytest.raises(error, match=told):
        limits_of(partition, ask=Programs(**said))


HOPPER = Limits(name="hopper", total_nodes=16)


def wanting(*nodes, **launcher):
    config = with_launcher(**launcher)
    return replace(config, axes=replace(config.axes, nodes=nodes))


@pytest.mark.parametrize(
    ("nodes", "asked", "limits", "share"),
    [((1, 4), None, {}, 4), ((1,), None, {"total_nodes": 1}, 1), ((1, 8), 8, {}, 8), ((1, 8), 64, {}, 64),
     ((2,), 8, {"max_nodes_per_user": 2}, 2), ((4,), None, {"max_nodes": 4, "max_nodes_per_user": 100}, 4)],
)  # fmt: skip
def test_what_a_sweep_may_hold(nodes, asked, limits, share):
    assert node_share(wanting(*nodes, max_nodes=asked), replace(HOPPER, **limits)) == share


@pytest.mark.parametrize(
    ("nodes", "asked", "limits", "told"),
    [
        ((1, 8), None, {}, "sweep.nodes up to 8; partition hopper has 16 nodes, by default a sweep takes 4: set launcher.max_nodes=8"),
        ((1, 8), 6, {}, "partition hopper has 16 nodes, launcher.max_nodes=6: set launcher.max_nodes=8"),
        ((4, 32), 64, {}, "partition hopper has 16 nodes: leave out what is larger, sweep.nodes=[4]"),
        ((8,), 8, {"max_nodes": 4}, "and gives a job 4: leave out what is larger"),
        ((8,), None, {"max_nodes_per_user": 4}, "a user 4 at a time: leave out what is larger"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_before_anything_is_submitted(nodes, asked, limits, told):
    with refused(told):
        node_share(wanting(*nodes, max_nodes=asked), replace(HOPPER, **limits))


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
