"""The health of a node, read from trees like those of Linux and from the fake NVML, with planted faults."""

import json
import os
import resource
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.agent import test_gpus
from tests.unit.agent.test_gpus import A, B, gpu
from ultrabench.agent import health_reader, health_sources
from ultrabench.agent.health_reader import HealthReader
from ultrabench.agent.ranks.gpus import VisibleGpu
from ultrabench.node_health import CHECKS, Health, Reading, complaints, examine, findings_of, to_facts

driver, library = test_gpus.driver, test_gpus.library
GPUS = [VisibleGpu("0", "GPU-a", A), VisibleGpu("1", "GPU-b", B)]
HCAS = [f"mlx5_{n}" for n in range(8)]


def tree(root):
    """Files of a sound node: eight adapters with a port each, two NUMA nodes with all cores, and their governor."""
    files = {"proc/sys/kernel/numa_balancing": "0", "dev/shm/.keep": ""}
    for n, hca in enumerate(HCAS):
        files |= {f"sys/class/infiniband/{hca}/board_id": "MT_0000000838"}
        files |= port(hca, state="4: ACTIVE", phys_state="5: LinkUp", rate="400 Gb/sec (4X NDR)")
        files |= port(hca, **{f"counters__{name}": "0" for name in health_sources.MAX_COUNT_BY_COUNTER})
        files |= {f"sys/class/infiniband_verbs/uverbs{n}/ibdev": hca, f"dev/infiniband/uverbs{n}": ""}
    for cpu in os.sched_getaffinity(0):
        files[f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = "performance"
        files[f"sys/devices/system/cpu/cpu{cpu}/node1/cpu"] = ""
    files |= {f"sys/devices/system/node/node{n}/cpulist": "" for n in (0, 1)}
    files |= {f"sys/bus/pci/devices/{bus.lower()[4:]}/numa_node": "1" for bus in (A, B)}
    return plant(root, files)


def plant(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def port(hca, **files):
    folder = f"sys/class/infiniband/{hca}/ports/1"
    return {f"{folder}/{name.replace('__', '/')}": text for name, text in files.items()}


@pytest.fixture
def look(tmp_path, monkeypatch, capsys):
    """Reads the tree without another process; returns the reading."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)

    def read(root=tmp_path, gpus=()):
        monkeypatch.setattr(sys, "argv", ["", str(root), str(root), json.dumps(gpus)])
        monkeypatch.setattr(sys, "stdin", ["\n"])
        health_sources.main()
        lines = filter(None, capsys.readouterr().out.splitlines())
        return Reading(time.monotonic(), {k: v for line in lines for k, v in json.loads(line).items()})

    return read


def bad(findings):
    return {name: (f.health, *f.numbers) for name, f in findings.items() if f.health in ("fail", "warn")}


LOST = port("mlx5_3", state="1: DOWN", phys_state="2: Polling", counters__link_downed="2")
CLASSES = {"1b": "0x020700", "1c": "0x030200"}
HIDDEN = {f"sys/bus/pci/devices/0000:{bus}:00.0/class": number for bus, number in CLASSES.items()}
POWERSAVE = {"sys/devices/system/cpu/cpu900/cpufreq/scaling_governor": "powersave"}
FAULTS = [
    (LOST, {"InfiniBand link lost": ("fail", "mlx5_3:1"), "InfiniBand ports": ("warn", "mlx5_3:1")}),
    (port("mlx5_3", state="1: DOWN", phys_state="2: Polling"), {"InfiniBand ports": ("warn", "mlx5_3:1")}),
    (port("mlx5_3", state="1: DOWN", phys_state="3: Disabled", counters__link_downed="2"), {}),
    (port("mlx5_3", state="2: INIT", counters__link_downed="2"), {"InfiniBand ports": ("warn", "mlx5_3:1")}),
    (port("mlx5_3", rate="100 Gb/sec (2X HDR)"), {"InfiniBand rate": ("warn", "mlx5_3:1")}),
    (HIDDEN, {"InfiniBand access": ("warn", "PCI 0000:1b:00.0")}),
    (POWERSAVE, {"CPU governor": ("warn", "powersave")}),
    ({"proc/sys/kernel/numa_balancing": "1"}, {"NUMA balancing": ("warn", "kernel.numa_balancing")}),
]  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(tmp_path, look, files, expected):
    tree(tmp_path)
    assert bad(examine(*[look()] * 2)) == {}
    findings = examine(*[look(plant(tmp_path, files))] * 2)
    assert bad(findings) == expected
    assert findings_of(json.loads(json.dumps(to_facts(findings)))) == findings, "the journal keeps it"


def test_new_errors_of_a_port_count_and_old_ones_do_not(tmp_path, look):
    errors = [
        examine(look(plant(tree(tmp_path), port("mlx5_5", counters__symbol_error=first))),
                look(plant(tmp_path, port("mlx5_5", counters__symbol_error=last))))["InfiniBand errors"]
        for first, last in ((40, 40), (40, 47), (40, 3), (0xFFFF, 0xFFFF), (0, "N/A (no PMA)"), (0, 0))
    ]  # fmt: skip
    assert [e.health for e in errors] == ["ok", "warn", "unknown", "unknown", "unknown", "ok"]
    assert errors[1].numbers == {"mlx5_5:1 symbol_error": 7}
    alone = look(plant(tmp_path, port("mlx5_5", counters__symbol_error=40)))
    assert examine(alone, alone)["InfiniBand errors"].health is Health.UNKNOWN, "40 may be years old"


def test_a_container_that_hides_devices_or_memory_is_named(tmp_path, look, monkeypatch):
    tree(tmp_path)
    (tmp_path / "dev/infiniband/uverbs6").unlink()
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (2**26, 2**26))
    small = SimpleNamespace(f_bavail=2**14, f_frsize=2**12)  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    for name, value in {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_NET": "Socket"}.items():
        monkeypatch.setenv(name, value)
    assert bad(examine(*[look()] * 2)) == {
        "InfiniBand access": ("warn", "/dev/infiniband/uverbs6"),
        "locked memory": ("warn", "65536 KiB"),
        "/dev/shm": ("warn", f"{tmp_path}/dev/shm"),
        "scratch": ("warn", str(tmp_path)),
        "NCCL variables": ("warn", "NCCL_NET=Socket", "NCCL_P2P_DISABLE=1"),
    }


def test_without_any_source_all_is_unknown(tmp_path, look):
    reading = look(tmp_path / "absent", GPUS)
    values = {k: v for k, v in reading.values.items() if k not in ("locked memory", "NCCL variables")}
    findings = examine(*[Reading(0.0, values)] * 2)
    assert {f.health for f in findings.values()} == {Health.UNKNOWN}
    assert findings_of({}) == findings


SOUND = {"ecc": 0, "ecc_in_life": 0, "remap_pending": 0, "remap_failed": 0, "links": 2, "power": 700_000,
         "default_power": 700_000} | {f"link{n}_error{kind}": 5 for n in (0, 1) for kind in range(4)}  # fmt: skip
SICK = {"ecc": 2, "ecc_in_life": 3, "remap_pending": 1, "remap_failed": 1, "power": 500_000, "link1_error0": 6,
        "link0_error2": 90_000}  # fmt: skip


def test_faults_of_gpus_are_found_by_nvml(tmp_path, driver, monkeypatch):
    def set_facts(**of_b):
        facts_by_gpu = {"a": SOUND, "b": SOUND | of_b}
        lines = [f"GPU-{gpu} {name} {n}" for gpu, facts in facts_by_gpu.items() for name, n in facts.items()]
        (tmp_path / "facts").write_text("\n".join(lines))

    monkeypatch.setenv("FAKE_HEALTH", str(tmp_path / "facts"))
    set_facts()
    with closing(HealthReader(GPUS, tree(tmp_path))) as reader:
        first = reader.read()
        assert first.values.keys() == CHECKS.keys(), "each check has a source"
        assert bad(examine(first, first)).keys() <= {"locked memory"}
        checks = [n for n in CHECKS if n.startswith(("ECC", "row", "NVLink", "power", "GPU"))]
        assert {examine(first, reader.read_again())[n].health for n in [*checks, "NUMA"]} == {Health.OK}
        set_facts(**SICK)
        driver(gpu("a", A), gpu("b", B, mask=0x4 | 0x40))
        plant(tmp_path, {f"sys/bus/pci/devices/{B.lower()[4:]}/numa_node": "0"})
        facts = to_facts(examine(first, reader.read_again()))
    failures = ["ECC errors (GPU 1: 2 errors)", "row remapping failed (GPU 1)"]
    assert [*complaints(facts, Health.FAIL).values()] == failures
    assert facts["warn"]["NVLink errors"] == {"GPU 1 link 1 replay": 1}
    assert list(facts["warn"]["NVLink CRC errors"]) == ["GPU 1 link 0 CRC flit"]
    assert facts["warn"]["power limit"] == {"GPU 1": 200}
    assert {"ECC errors in its life", "row remapping pending"} <= facts["warn"].keys()
    assert list(facts["warn"]["GPU clocks"]) == ["GPU 1 hardware thermal slowdown"]
    assert list(facts["warn"]["NUMA"]) == ["GPU 1 on NUMA node 0"]


@pytest.mark.parametrize("trouble", ["FAKE_FAILURE", "FAKE_HANG"])
def test_a_driver_that_fails_or_hangs_is_unknown_and_the_rest_is_known(
    tmp_path, driver, monkeypatch, trouble
):
    monkeypatch.setenv(trouble, "1")
    monkeypatch.setattr(health_reader, "FIRST_READING_LIMIT_S", 60.0 if trouble == "FAKE_FAILURE" else 4.0)
    began_s = time.monotonic()
    with closing(HealthReader(GPUS, tree(tmp_path))) as reader:
        first = reader.read()
        findings = examine(first, reader.read_again())
    assert findings["ECC errors"].health is Health.UNKNOWN
    assert findings["InfiniBand ports"].health is Health.OK
    assert time.monotonic() - began_s < 30
    assert reader._child.returncode is not None


def test_the_docs_show_the_table_of_checks():
    text = (Path(__file__).parents[3] / "docs/guide/cluster.md").read_text()
    rows = [
        f"| {name} | {check.limit_text} | {'refuses' if check.excludes_node else 'warns'} | {check.remedy} |"
        for name, check in CHECKS.items()
    ]
    assert "\n".join(rows) in text, "docs/guide/cluster.md needs:\n" + "\n".join(rows)
