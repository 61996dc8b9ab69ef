"""Hardware comes from YAML files only: the package's, or the user's own."""

import math
from pathlib import Path

import pytest

from ultrabench.errors import ConfigError
from ultrabench.hardware import Hardware
from ultrabench.record import to_dict
from ultrabench.sweep.config.compose import files, read_yaml
from ultrabench.sweep.config.load import config_from_tree, load_config, read_hardware
from ultrabench.sweep.plan import make_plan

OURS = """# Two of our own GPUs.
gpu: Toaster-9000
peak_flops_per_s: {bf16: 1.0e14}
mem_bytes: 24000000000
hbm_bytes_per_s: 1.0e12
link_bytes_per_s: 3.2e10
reported_as: [ACME Toaster 9000]
source: https://example.org/toaster
gpus_per_node: 2
node_link_bytes_per_s: 1.0e10
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))


def write(name, text):
    path = Path("ultrabench/hardware") / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", files("hardware"))
def test_every_file_is_hardware_with_a_source(name):
    hardware = load_config([f"hardware={name}"]).hardware
    assert hardware.source.startswith("https://") or hardware.device == "cpu"
    assert hardware.device == "cpu" or hardware.peak_flops_per_s["bf16"] > hardware.peak_flops_per_s["fp32"]


@pytest.mark.parametrize(
    ("name", "bf16", "gib", "link"),
    [
        ("h100x8", 989e12, 80, 450e9),
        ("h100-pcie-x8", 756e12, 80, 64e9),
        ("h100-nvl-x8", 835e12, 87.5, 64e9),
        ("h200x8", 989e12, 131.3, 450e9),
        ("a100-80x8", 312e12, 80, 300e9),
        ("a100-40x8", 312e12, 37.3, 300e9),
        ("b200x8", 2.25e15, 167.6, 900e9),
        ("gb200x4", 2.5e15, 173.2, 900e9),
        ("l40s-x8", 362.05e12, 44.7, 32e9),
        ("mi300x-x8", 1307.4e12, 192, 448e9),
    ],
)
def test_rates_are_the_dense_ones_of_the_data_sheets(name, bf16, gib, link):
    hardware = load_config([f"hardware={name}"]).hardware
    assert (hardware.peak_flops_per_s["bf16"], hardware.link_bytes_per_s) == (bf16, link)
    assert hardware.mem_bytes / 2**30 == pytest.approx(gib, abs=0.05)


def test_no_two_files_hold_the_rates_of_one_gpu():
    gpus = [read_yaml(path)["gpu"] for path in files("hardware").values()]
    assert len(gpus) == len(set(gpus))


def test_a_gpu_of_the_users_own_is_planned_and_recorded():
    write("toasters", OURS)
    config = load_config(["hardware=toasters", "model=tiny", "sweep.nodes=[1]"])
    assert (config.hardware.gpu, config.hardware.device) == ("Toaster-9000", "cuda")
    assert make_plan(config).runs
    Path("ultrabench/hardware/toasters.yaml").unlink()  # what was launched does not need the file
    assert config_from_tree(config.resolved).hardware == config.hardware
    assert read_hardware(to_dict(config.hardware)) == config.hardware


def test_another_node_of_a_known_gpu_names_the_gpu_only():
    write("toasters", OURS)
    write("toastersx4", "gpu: Toaster-9000\ngpus_per_node: 4\n")
    write("pair", "gpu: H100-SXM\ngpus_per_node: 2\nnode_link_bytes_per_s: 1.0e10\nmem_bytes: null\n")
    four, pair = (load_config([f"hardware={n}", "sweep.nodes=[1]"]).hardware for n in ("toastersx4", "pair"))
    assert (four.name, four.gpus_per_node, four.mem_bytes) == ("toastersx4", 4, 24 * 10**9)
    assert (pair.gpus_per_node, pair.node_link_bytes_per_s, pair.mem_bytes) == (2, 1e10, 80 * 2**30)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("source: https://example.org/toaster\n", ""), "unknown hardware.gpu 'Toaster-9000'"),
        (("{bf16: 1.0e14}", "{}"), "lacks values of peak_flops_per_s or reported_as"),
        (("[ACME Toaster 9000]", "[]"), "lacks values of peak_flops_per_s or reported_as"),
        (("mem_bytes: 24000000000\n", ""), "hardware lacks mem_bytes"),
        (
            ("mem_bytes: 24000000000", "mem_bytes: 24GB"),
            "hardware.mem_bytes='24GB' is no whole number of bytes",
        ),
        (("1.0e14", "-1"), "hardware.peak_flops_per_s.bf16=-1.0; must be > 0"),
        (("3.2e10", ".inf"), "hardware.link_bytes_per_s=inf; must be > 0 and finite"),
        (("gpu: ", "device: tpu\ngpu: "), "hardware.device='tpu'; must be cuda or cpu"),
    ],
)
def test_what_is_no_hardware_is_refused_in_one_line(change, line):
    write("toasters", OURS.replace(*change))
    with pytest.raises(ConfigError) as raised:
        load_config(["hardware=toasters"])
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_precision_without_a_rate_is_refused():
    write("toasters", OURS)
    with pytest.raises(ConfigError, match="unknown precision of Toaster-9000 'fp64'"):
        make_plan(load_config(["hardware=toasters", "kernel.precision=fp64", "sweep.nodes=[1]"]))


def test_the_memory_of_a_rank_can_be_overridden():
    hardware = load_config(["hardware=h100x8", "hardware.mem_bytes=1000"]).hardware
    assert (hardware.mem_bytes, math.isclose(hardware.link_bytes_per_s, 450e9)) == (1000, True)
    assert isinstance(hardware, Hardware)
