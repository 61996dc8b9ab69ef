"""What scontrol, sinfo and sacctmgr of Slurm 22.05 printed, shortened, and what a sweep may hold of it."""

import getpass
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit.allocations import with_launcher
from tests.unit.launchers.conftest import CONFIG, PARTITIONS, UNENFORCED
from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.choose import PARTITION_DIVISOR, max_sweep_nodes
from ultrabench.launchers.slurm.site import Limits, Partition, Site

NODES = """hopper|1|16|2000|down*|gpu:h100:8
hopper|3|16|2000|idle|gpu:h100:8
hopper|1|16|2000|mixed|gpu:h100:8
hopper|1|16|2000|drained|gpu:h100:8
hopper|2|64|515000|idle~|gpu:a100:4(S:0-1),gpu:v100:2(S:0)
debug|2|16|2000|maint|(null)
"""
QOSES = """strong|DenyOnLimit,OverPartQOS|||UNLIMITED|node=1||
short|DenyOnLimit|3|20|00:30:00|gres/gpu=16|gres/gpu=24,node=4|
part||||1-00:00:00|node=6||node=5
normal|||||||
other|||||||
"""
SILENT = "Unable to contact slurm controller (connect failure)\n", 1


@pytest.fixture
def slurm(programs):
    """The site, of which programs print something else where the test says so."""

    def ask(answers):
        programs.says |= {"config": CONFIG, "nodes": NODES, "qos": QOSES} | answers
        programs.write()
        return Site()

    return ask


def test_partitions_and_their_nodes(slurm):
    hopper = Partition(
        name="hopper", is_default=True, state="UP", total_nodes=8, up_nodes=6, cpus_per_node=16,
        mem_mb_per_node=2000, gpus_per_node=8, gres="gpu:h100:8", node_kinds=(
            "6 nodes of 16 CPUs, 2000 MB, gpu:h100:8",
            "2 nodes of 64 CPUs, 515000 MB, gpu:a100:4(S:0-1),gpu:v100:2(S:0)",
        ),
    )  # fmt: skip
    debug = Partition(
        name="debug", state="UP", total_nodes=2, up_nodes=0, max_nodes=2, max_time_minutes=30, partition_qos="part",
        cpus_per_node=16, mem_mb_per_node=2000, gpus_per_node=0, node_kinds=("2 nodes of 16 CPUs, 2000 MB, no gres",),
    )  # fmt: skip
    secret = Partition(name="secret", state="DOWN", total_nodes=8, max_time_minutes=3600)
    assert slurm({}).partitions == [hopper, debug, secret]
    limits = slurm({}).limits(None, None, None)
    assert limits.name == "hopper"
    assert (limits.cluster, limits.accounting, limits.max_array_size) == ("alps", True, 101)


NONE = (None,) * 6


@pytest.mark.parametrize(
    ("says", "partition", "account", "qos", "limits"),
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
        ({"nodes": SILENT}, None, None, None, (None, 4, 20, 3, 30, 30)),
        ({"assoc": SILENT}, None, None, None, NONE),
        ({"config": UNENFORCED}, None, None, None, NONE),
    ],
)
def test_limits_of_qos_and_account(slurm, programs, says, partition, account, qos, limits):
    """A source that fails leaves its values open; limits that are not enforced are not asked for."""
    site_limits = slurm(says).limits(partition, account, qos)
    names = "max_nodes", "max_nodes_per_user", "max_submit", "max_jobs", "max_wall_minutes", "job_minutes"
    assert tuple(getattr(site_limits, name) for name in names) == limits
    is_enforced = "config" not in says
    assert (f" where user={getpass.getuser()} cluster=alps " in " ".join(programs.asked)) == is_enforced


@pytest.mark.parametrize(("text", "by"), [("slurmdbd", "none"), ("associations,", "nojobs,associations,")])
def test_a_cluster_may_record_no_jobs(slurm, text, by):
    assert not slurm({"config": CONFIG.replace(text, by)}).limits(None, None, None).accounting


@pytest.mark.parametrize(
    ("partition", "says", "error", "message"),
    [
        ("hoper", {}, ConfigError, r"launcher.partition 'hoper'; did you mean hopper\?"),
        (None, {"partitions": PARTITIONS.replace("Default=YES", "Default=NO")}, ConfigError,
         r"set launcher.partition= \(hopper, debug, secret\)"),
        (None, {"config": SILENT}, ClusterError, "connect failure.*login node"),
        (None, {"partitions": SILENT}, ClusterError, "connect failure.*login node"),
    ],
)  # fmt: skip
def test_a_partition_that_cannot_be_read(slurm, partition, says, error, message):
    with refused(kind=error, match=message):
        slurm(says).limits(partition, None, None)


HOPPER = Limits(name="hopper", total_nodes=16)


def wanting(*nodes, **launcher):
    config = with_launcher(**launcher)
    return replace(config, axes=replace(config.axes, nodes=nodes))


@pytest.mark.parametrize(
    ("nodes", "cap", "limits", "share"),
    [((1, 4), None, {}, 4), ((1,), None, {"total_nodes": 1}, 1), ((1, 8), 8, {}, 8), ((1, 8), 64, {}, 64),
     ((2,), 8, {"max_nodes_per_user": 2}, 2), ((4,), None, {"max_nodes": 4, "max_nodes_per_user": 100}, 4)],
)  # fmt: skip
def test_what_a_sweep_may_hold(nodes, cap, limits, share):
    assert max_sweep_nodes(wanting(*nodes, max_nodes=cap), replace(HOPPER, **limits)) == share


@pytest.mark.parametrize(
    ("nodes", "cap", "limits", "message"),
    [
        ((1, 8), None, {}, "sweep.nodes up to 8; partition hopper has 16 nodes, by default a sweep uses 4: "
        "set launcher.max_nodes=8"),
        ((1, 8), 6, {}, "the sweep may use launcher.max_nodes=6: set launcher.max_nodes=8"),
        ((4, 32), 64, {}, "partition hopper has 16 nodes: use fewer nodes, such as sweep.nodes=[4]"),
        ((8,), 8, {"max_nodes": 4}, ", at most 4 per job: use fewer nodes"),
        ((8,), None, {"max_nodes_per_user": 4}, ", at most 4 per user: use fewer nodes"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_before_anything_is_submitted(nodes, cap, limits, message):
    with refused(message):
        max_sweep_nodes(wanting(*nodes, max_nodes=cap), replace(HOPPER, **limits))


SOME = st.none() | st.integers(1, 40)


@given(nodes=st.sets(st.integers(1, 40), min_size=1), cap=SOME, total=st.integers(1, 40), job=SOME, user=SOME)
def test_every_size_of_a_sweep_can_be_submitted(nodes, cap, total, job, user):
    """Otherwise a launch would wait for ever."""
    limits = replace(HOPPER, total_nodes=total, max_nodes=job, max_nodes_per_user=user)
    possible = max(nodes) <= min(n for n in (total, job, user) if n is not None)
    try:
        share = max_sweep_nodes(wanting(*nodes, max_nodes=cap), limits)
    except ConfigError:
        assert not possible or max(nodes) > (cap or max(1, total // PARTITION_DIVISOR))
        return
    assert possible
    assert max(nodes) <= share
    assert user is None or share <= user
