import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.agent.agent_group import free_port
from ultrabench.agent.node_identity import NodeIdentity, identify_node
from ultrabench.store.events import Start

HERE = socket.gethostname().split(".")[0]
JOB = {"SLURM_JOB_ID": "60", "SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu02"}
ARRAY = {**JOB, "SLURM_ARRAY_JOB_ID": "57", "SLURM_ARRAY_TASK_ID": "3"}
LOCAL = {"SUBMITIT_LOCAL_GLOBALID": "1"}


def identity(**words):
    return NodeIdentity(**{"node": 0, "host": HERE, **words})


@pytest.mark.parametrize(
    ("environ", "simulated", "expected"),
    [
        ({}, True, identity(host="local-0")),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "0"}, False, identity(node=1, host="gpu02", job=Start(job_id="57_0"), array_task="0")),
        ({**JOB, "SLURM_RESTART_COUNT": "2"}, False, identity(node=1, host="gpu02", job=Start(job_id="60", restart=2))),
        ({**JOB, "SLURM_RESTART_COUNT": ""}, False, identity(node=1, host="gpu02", job=Start(job_id="60"))),
        ({"SLURM_JOB_ID": "60"}, False, identity(job=Start(job_id="60"))),
        ({**JOB, "SLURMD_NODENAME": ""}, False, identity(node=1, job=Start(job_id="60"))),
        (LOCAL, False, identity(node=1)),
        ({**ARRAY, **LOCAL}, True, identity(node=1, host="local-1")),
    ],
)  # fmt: skip
def test_where_an_agent_is(environ, simulated, expected):
    assert identify_node(environ, simulated) == expected


@pytest.mark.parametrize(
    ("environ", "job", "file", "folder"),
    [
        ({}, None, "leader.json", "/s/allocations/n1-a.0"),
        (LOCAL, None, "leader.json", "/s/allocations/n1-a.0"),
        (JOB, Start(job_id="60", restart=0), "leader-60.0.json", "/s/allocations/n1-a.0"),
        ({**ARRAY, "SLURM_RESTART_COUNT": "1"}, Start(job_id="57_3", restart=1), "leader-57_3.1.json",
         "/s/allocations/n1-a.0.3"),
    ],
)  # fmt: skip
def test_what_follows_from_it(environ, job, file, folder):
    found = identify_node(environ)
    assert (found.job, found.rendezvous_file) == (job, file)
    assert found.folder("/s/allocations/n1-a.0") == Path(folder)


STARTS = st.tuples(st.integers(1, 99), st.none() | st.integers(0, 9), st.integers(0, 3))


@given(first=STARTS, second=STARTS)
def test_starts_that_differ_have_files_of_their_own(first, second):
    """Agents of a requeued job, or of another element, never read the address of the others' leader."""

    def of(array, task, restart):
        words = {"SLURM_JOB_ID": f"{array}", "SLURM_RESTART_COUNT": f"{restart}"}
        more = {} if task is None else {"SLURM_ARRAY_JOB_ID": f"{array}", "SLURM_ARRAY_TASK_ID": f"{task}"}
        return identify_node(words | more)

    assert (of(*first).rendezvous_file == of(*second).rendezvous_file) == (first == second)


@pytest.mark.parametrize(
    ("host", "one_host", "variable", "address"),
    [
        ("anything", True, "10.0.0.9", "127.0.0.1"),
        ("localhost", False, "10.0.0.9", "10.0.0.9"),
        ("localhost", False, None, "127.0.0.1"),
        ("no.such.host.invalid", False, "10.0.0.9", "10.0.0.9"),
        ("192.0.2.7", False, "10.0.0.9", "192.0.2.7"),
    ],
)
def test_the_address_others_can_reach(monkeypatch, host, one_host, variable, address):
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    if variable:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", variable)
    assert identity(host=host).address(one_host) == address


def test_a_port_is_none_that_the_system_gives_away():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(30)}
    assert all(port < first_given for port in ports)
    assert len(ports) > 20
