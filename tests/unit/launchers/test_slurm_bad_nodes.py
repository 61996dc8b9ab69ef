"""Nodes that jobs avoid: which of a failed job's nodes, how many a partition can spare, and which it has."""

from types import SimpleNamespace

import pytest

from tests.unit.allocations import with_launcher
from tests.unit.launchers import played_slurm
from tests.unit.launchers.played_slurm import A, rows
from ultrabench.errors import ConfigError
from ultrabench.host_list import expand_hosts
from ultrabench.launchers.slurm import launcher as slurm_module
from ultrabench.launchers.slurm import site
from ultrabench.launchers.slurm.query import CommandError

slurm = played_slurm.slurm
EXITED = "srun: error: {}: task{} 1: Exited with exit code 1\n"


@pytest.mark.parametrize(
    ("log", "hosts"),
    [
        (None, ("gpu03", "gpu06", "gpu07")), ("no module torch\n", ("gpu03", "gpu06", "gpu07")),
        (EXITED.format("gpu06", ""), ("gpu06",)), (EXITED.format("gpu[06-07]", "s"), ("gpu06", "gpu07")),
        # The others are killed for that.
        (EXITED.format("gpu06", "") + "srun: error: gpu03: task 0: Terminated\n", ("gpu06",)),
        (EXITED.format("elsewhere", ""), ("gpu03", "gpu06", "gpu07")),
    ],
)  # fmt: skip
def test_a_job_that_failed_before_its_agents_started_did_so_on_the_nodes_that_srun_names_or_on_all(
    slurm, log, hosts
):
    slurm.submitted(A)
    if log is not None:
        slurm.log(A).write_text(log)
    slurm.listed = rows(("57_0", "FAILED"), nodes="gpu[03,06-07]")
    slurm.observe()
    assert slurm.observe(after=played_slurm.GRACE_S).ended_jobs[A].unstarted_hosts == hosts


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "PREEMPTED"])
def test_a_job_that_did_not_fail_says_nothing_about_the_start_of_agents(slurm, programs, state):
    programs.says |= {"nodes": "gpu03\n"}
    programs.write()
    slurm.submitted(A)
    slurm.listed = rows(("57_0", state), nodes="gpu03")
    slurm.observe()
    assert slurm.observe(after=played_slurm.GRACE_S).ended_jobs[A].unstarted_hosts == ()


@pytest.mark.parametrize(
    ("usable", "num_nodes", "sent", "said"),
    [
        ("gpu[01-08]", 2, ["a", "gpu01", "gpu02"], None),
        ("gpu[01-08]", 7, ["a", "gpu01"], "gpu02 cannot be avoided: 8 nodes of the partition can be used, "
        "a job needs 7"),
        ("gpu[01-08]", 8, ["a"], "gpu01,gpu02 cannot be avoided"),
        ("gpu01,b", 2, ["a"], "gpu01,gpu02 cannot be avoided"),
        ("", 8, ["a", "gpu01", "gpu02"], None),  # Slurm does not say which nodes there are
    ],
)  # fmt: skip
def test_an_exclusion_that_leaves_too_few_nodes_is_never_sent(
    slurm, monkeypatch, usable, num_nodes, sent, said
):
    """The surest comes first, and the last is used again first."""
    scripts, notes = [], []
    usable_nodes = frozenset(expand_hosts(usable)) - {""}
    nodes = site.PartitionNodes(
        frozenset("ab") | {*expand_hosts("gpu[01-08]")} if usable else frozenset(), usable_nodes
    )
    monkeypatch.setattr(slurm_module, "partition_nodes", lambda config: nodes)
    monkeypatch.setattr(
        slurm_module, "array_script", lambda allocations, config, exclude, module: scripts.append([*exclude])
    )
    monkeypatch.setattr(slurm_module, "submit", lambda path, script, environment: "57")
    slurm.launcher.submit([_allocation(num_nodes)], ["a", "gpu01", "gpu02"], notes.append)
    assert scripts == [sent]
    assert [said in note for note in notes] == ([True] if said else [])


def test_the_nodes_that_jobs_may_get_are_those_of_the_partition_that_are_up_without_excluded_ones(
    monkeypatch,
):
    table = "gpu01|idle|hopper*\ngpu01|idle|debug\ngpu02|down*|hopper*\ngpu03|allocated|hopper*\ngpu09|idle|debug\n"
    asked = []
    monkeypatch.setattr(site, "ask", lambda *words: asked.append(words) or table)
    assert site.partition_nodes(with_launcher().launcher.slurm).usable == {"gpu01", "gpu03"}
    assert site.partition_nodes(with_launcher(exclude="gpu[02-03]").launcher.slurm).usable == {"gpu01"}
    assert not any("--partition" in word for word in asked[-1])
    site.partition_nodes(with_launcher(partition="debug").launcher.slurm)
    assert "--partition=debug" in asked[-1]

    def silent(*words):
        raise CommandError("no answer")

    monkeypatch.setattr(site, "ask", silent)
    assert site.partition_nodes(with_launcher().launcher.slurm).usable == frozenset()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()), ("gpu01", ("gpu01",)), ("gpu[01-03,07],login1", ("gpu01", "gpu02", "gpu03", "gpu07", "login1")),
        ("r[1-2]n[9-10]", ("r1n9", "r1n10", "r2n9", "r2n10")), ("a, b,a", ("a", "b")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
    ],
)  # fmt: skip
def test_lists_of_hosts_are_read_as_slurm_writes_them(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["gpu[01-", "gpu[a-b]", "gpu]01[", "gpu[1-9999999]", "a[1-999]b[1-999]c[1-9]"]
)
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ConfigError, match="hosts"):
        expand_hosts(text)


def test_a_node_that_slurm_no_longer_lists_needs_no_exclusion(slurm, monkeypatch):
    """sbatch refuses a job that excludes an unknown name."""
    scripts, notes = [], []
    nodes = site.PartitionNodes(frozenset({"gpu01", "gpu02", "gpu03"}), frozenset({"gpu01", "gpu02"}))
    monkeypatch.setattr(slurm_module, "partition_nodes", lambda config: nodes)
    monkeypatch.setattr(
        slurm_module, "array_script", lambda allocations, config, exclude, module: scripts.append([*exclude])
    )
    monkeypatch.setattr(slurm_module, "submit", lambda path, script, environment: "57")
    slurm.launcher.submit([_allocation(1)], ["gpu06", "gpu02", "gpu03"], notes.append)
    assert (scripts, notes) == ([["gpu02", "gpu03"]], [])


def test_a_wrong_name_in_launcher_exclude_is_said(slurm, monkeypatch):
    nodes = site.PartitionNodes(frozenset({"gpu01", "gpu02"}), frozenset({"gpu01", "gpu02"}))
    monkeypatch.setattr(slurm_module, "partition_nodes", lambda config: nodes)
    monkeypatch.setattr(slurm_module, "array_script", lambda allocations, config, exclude, module: "")

    def refuse(path, script, environment):
        raise CommandError("Batch job submission failed: Invalid node name specified")

    monkeypatch.setattr(slurm_module, "submit", refuse)
    slurm.launcher._config = with_launcher(exclude="gpu[02,06]")
    with pytest.raises(
        ConfigError, match=r"exclude=gpu\[02,06\] names nodes that Slurm does not list: gpu06"
    ) as refused:
        slurm.launcher.submit([_allocation(1)], [], print)
    assert "remove gpu06 from launcher.exclude" in str(refused.value)


def _allocation(num_nodes):
    """What a Slurm launcher asks of an allocation that it submits."""
    return SimpleNamespace(name=A, nodes=num_nodes, sweep_dir="quick", sweep_id="")
