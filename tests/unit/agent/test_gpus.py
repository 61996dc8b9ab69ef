"""GPUs as NVML describes them, asked through a driver library of our own (fake_nvml.c): this needs no GPU."""

import os
import pwd
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import wait_until
from tests.unit.agent.test_cleanup import OneNode
from ultrabench.agent.ranks import gpus
from ultrabench.agent.ranks.gpus import VisibleGpu, foreign_processes, visible_gpus

GIB = 2**30
DRIVER = Path(__file__).parent / "fake_nvml.c"
A, B, C = "00000000:1B:00.0", "00000000:43:00.0", "00000001:C3:00.0"


def gpu(letter, bus, used=0, mhz=1980, mask=0, pid=0, energy_mj=0, power_mw=0):
    return f"GPU-{letter} {bus} {used} {80 * GIB} {mhz} {mask} {pid} {energy_mj} {power_mw}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", DRIVER], check=True)
    return folder


@pytest.fixture
def driver(tmp_path, library, monkeypatch):
    """Sets the GPUs of this driver, which processes started from here on find."""

    def set_gpus(*lines):
        (tmp_path / "gpus.new").write_text("".join(lines))
        (tmp_path / "gpus.new").replace(tmp_path / "gpus")

    set_gpus(gpu("a", A, 1 * GIB), gpu("b", B))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_GPUS", str(tmp_path / "gpus"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return set_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "012"), ("2,0", "20"), (" 1 ", "1"), ("GPU-bb22,GPU-aa00", "20"), ("GPU-bb,0", "20"), ("", ""),
        ("-1", ""), ("NoDevFiles", ""), ("0,7,1", "0"), ("GPU-aa", ""), ("MIG-aa00", ""),
    ],
)  # fmt: skip
def test_visible_gpus_are_those_cuda_would_take(driver, monkeypatch, visible, expected):
    ids = {"0": ("aa00", A), "1": ("aa11", B), "2": ("bb22", C)}
    driver(*(gpu(*ids[n]) for n in "012"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [(g.number, g.uuid, g.bus_id) for g in visible_gpus()]
    assert gpus == [(n, f"GPU-{ids[n][0]}", ids[n][1]) for n in expected]


def mig(letter, bus, used=0, pid=0):
    return gpu(letter, bus, used, mhz=0, pid=pid).replace("GPU-", "MIG-")


MIG_A, MIG_B = ("0:0", "MIG-a1", A, "GPU-a"), ("0:1", "MIG-a2", A, "GPU-a")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a", "GPU-b"]), ("MIG-a2", ["MIG-a2"]), ("MIG-a1,MIG-a2", ["MIG-a1", "MIG-a2"]), ("1", ["GPU-b"]),
        ("MIG-c", []), ("MIG-a1,MIG-c", ["MIG-a1"]), ("0:0", []),
    ],
)  # fmt: skip
def test_mig_devices_are_visible_and_a_device_that_the_driver_does_not_list_is_named(
    driver, monkeypatch, capfd, visible, expected
):
    driver(gpu("a", A), mig("a1", A), mig("a2", A), gpu("b", B))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus._say_once.cache_clear()
    assert [g.uuid for g in visible_gpus()] == expected
    assert ("MIG-c: the driver does not list this device" in capfd.readouterr().err) == (
        "MIG-c" in (visible or "")
    )


def test_a_mig_device_has_its_own_memory_and_processes_and_the_clocks_of_its_gpu(driver, monkeypatch):
    driver(
        gpu("a", A, 40 * GIB, mhz=1500, pid=8, power_mw=700_000),
        mig("a1", A, GIB),
        mig("a2", A, 2 * GIB, pid=4242),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a1,MIG-a2")
    visible = visible_gpus()
    assert [(g.number, g.uuid, g.bus_id, g.board_uuid) for g in visible] == [MIG_A, MIG_B]
    assert foreign_processes(lambda pid: False) == [
        "process 4242 (python, unknown user) on GPU 0:1 with 2048 MiB"
    ]
    monkeypatch.setattr(gpus, "FREE_TIMEOUT_S", 0.0)
    script = "import json, os; from ultrabench.agent.ranks import gpus\n" + GAUGE_SCRIPT
    answer = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    assert answer.decode().split() == ["[1500000000.0,", "1500000000.0]", "()", "None"]


GAUGE_SCRIPT = """
gauge = gpus.GpuGauge(gpus.visible_gpus())
gauge.sample(is_measuring=True)
print(gauge.clocks_hz, gauge.powers_w, gauge.unfreed_memory_text(lambda: None))
"""


def test_every_process_that_is_not_ours_is_named(driver, monkeypatch):
    assert foreign_processes(lambda pid: False) == []
    me, user = os.getpid(), pwd.getpwuid(os.getuid()).pw_name
    driver(gpu("a", A, GIB, pid=me), gpu("b", B, 7, pid=4242), gpu("c", C, pid=99999999))
    mine = f"process {me} (python, user {user}) on GPU 0 with 1024 MiB"
    hidden = "process 99999999 (unknown program, unknown user) on GPU 2"
    assert foreign_processes(lambda pid: pid == 4242) == [mine, hidden]
    assert foreign_processes(lambda pid: True) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert foreign_processes(lambda pid: pid == 4242) == [mine]


@pytest.mark.parametrize("trouble", ["FAKE_FAILURE", "FAKE_HANG", "LD_LIBRARY_PATH"])
def test_a_driver_that_fails_hangs_or_is_absent_knows_nothing(driver, monkeypatch, trouble):
    monkeypatch.setenv(trouble, "1")
    monkeypatch.setattr(gpus, "LIST_TIMEOUT_S", 2.0 if trouble == "FAKE_HANG" else 60.0)
    assert visible_gpus() == []
    assert foreign_processes(lambda pid: False) == []


def test_without_a_driver_the_gauge_knows_nothing():
    gauge = gpus.GpuGauge([VisibleGpu("0", "GPU-none", "")])
    gauge.sample()
    assert (gauge.unfreed_memory_text(lambda: None), gauge.clocks_hz) == (None, [])


CLEAN = dict.fromkeys(("complaint", "core_shares", "health"))
CLEAN |= {
    name: [] for name in ("sm_clocks_hz", "slowdowns", "foreign_processes", "powers_w", "compiler_locks")
}
STEPS = """
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
for step in range(3):
    print(json.dumps({"event": "step", "step": step, "seconds": 0.1}), file=report)
here()
"""


def test_a_node_samples_its_gpus_and_names_the_one_whose_memory_is_not_freed_in_time(tmp_path, driver):
    with closing(OneNode(tmp_path, STEPS, "cuda")) as node:
        node.wait_for(1)
        assert len(node.ask("node.rank_events()")) == 3
        driver(gpu("a", A, 41 * GIB))
        freeing = threading.Event()

        def free():
            freeing.set()
            driver(gpu("a", A, int(2.5 * GIB)))  # the driver's own use may grow

        threading.Timer(1.0, free).start()
        assert node.ask("node.kill()") == CLEAN | {"sm_clocks_hz": [1980e6]}
        assert freeing.is_set()
        node.ask("setattr(gpus, 'FREE_TIMEOUT_S', 0.0)")
        for pid, holder in ((0, "no known process"), (77, "process 77")):
            driver(gpu("a", A, 41 * GIB, pid=pid))
            complaint = f"GPU 0 still has 40.0 GiB in use after the run: {holder}"
            assert node.ask("node.kill()")["complaint"] == complaint


def test_a_gauge_tells_clocks_and_the_faults_that_slow_them(tmp_path, driver):
    with closing(OneNode(tmp_path, STEPS, "cuda")) as node:
        node.ask("setattr(gpus, 'SAMPLE_INTERVAL_S', 0.0)")
        # No work, and a power cap that was reached, are no faults; the others are.
        for mhz, mask in ((1200, 0x1 | 0x4), (900, 0x8 | 0x40 | 0x80)):
            driver(gpu("a", A, mhz=mhz, mask=mask))
            node.ask("node._gpu_gauge.sample()")
        faults = ["hardware slowdown", "hardware thermal slowdown", "power brake"]
        assert node.ask("node.kill()") == CLEAN | {"sm_clocks_hz": [1200e6, 900e6], "slowdowns": faults}
        node.ask("node._gpu_gauge.clear()")
        driver()  # it fell off the bus
        node.ask("node._gpu_gauge.sample()")
        assert node.ask("node.kill()") == CLEAN


WARM_UP = """
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
open(f"pids/{os.getpid()}", "w").close()
for step, measured in enumerate((False, True, True)):
    while not os.path.exists(f"step{step}"):
        time.sleep(0.01)
    print(json.dumps({"event": "step", "step": step, "seconds": 0.1, "measured": measured}), file=report)
here()
"""


def test_the_power_is_that_of_the_measured_steps(tmp_path, driver):
    """The 50 kJ before the first measured step do not count."""
    with closing(OneNode(tmp_path, WARM_UP, "cuda")) as node:
        node.ask("setattr(gpus, 'SAMPLE_INTERVAL_S', 0.0)")
        node.wait_for(1)
        for step, energy_j in enumerate((10_000, 60_000, 60_070)):
            driver(gpu("a", A, energy_mj=energy_j * 1000, power_mw=900_000))
            (tmp_path / f"step{step}").touch()
            wait_until(lambda: node.ask("len([e for e in node.rank_events() if 'line' in e])"), 20)
        first_s, last_s = node.ask("[sample.time_s for sample in node._gpu_gauge._power_samples['0']]")
        assert node.ask("node.kill()")["powers_w"] == pytest.approx([70 / (last_s - first_s)])


def test_a_counter_that_began_again_is_not_used():
    samples = [gpus.PowerSample(0.0, 900.0, 400.0), gpus.PowerSample(1.0, 3.0, 300.0)]
    assert gpus.mean_power_w(samples) == 350.0  # W, the mean of both powers
    assert gpus.mean_power_w([gpus.PowerSample(0.0, 900.0, None)]) is None


def test_the_mean_power_is_the_energy_between_the_first_and_the_last_sample():
    """Whatever the power is at the samples; a sample of which the driver does not know the energy is left out."""
    energies = [(2.0, None), (3.0, 100.0), (5.0, 900.0), (13.0, 5100.0), (14.0, None)]
    samples = [gpus.PowerSample(time_s, energy_j, 120.0) for time_s, energy_j in energies]
    assert gpus.mean_power_w(samples) == 500.0
    assert gpus.mean_power_w(samples[:2]) == 120.0
    assert gpus.mean_power_w([]) is None


def test_energy_and_power_are_read_in_joules_and_watts(monkeypatch):
    """At the time of the sample, of the whole GPU, and only in measured steps."""
    answers = {
        "nvmlDeviceGetHandleByUUID": "board", "nvmlDeviceGetTotalEnergyConsumption": 7_000_250,
        "nvmlDeviceGetPowerUsage": 650_500, "nvmlDeviceGetClockInfo": 1500,
    }  # fmt: skip
    seconds = iter(range(100, 200))
    monkeypatch.setattr(gpus, "ask_nvml", lambda name, *_: answers.get(name))
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(gpus, "SAMPLE_INTERVAL_S", 0.0)
    gauge = gpus.GpuGauge([VisibleGpu("0", "GPU-a", A)])
    gauge.sample()
    assert gauge.clocks_hz == [1500e6], "it is all that is known"
    answers["nvmlDeviceGetClockInfo"] = 1400
    gauge.sample(is_measuring=True)
    answers["nvmlDeviceGetClockInfo"] = 1900  # parts of steps after the whole ones
    gauge.sample()
    (sample,) = gauge._power_samples["0"]
    assert (sample.energy_j, sample.power_w) == (7000.25, 650.5)
    assert gauge.clocks_hz == [1400e6]
    assert gauge.powers_w == (650.5,)
