"""Hardware comes from YAML files only: the package's, or the user's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import refused, write_config
from ultrabench.cli.predict.layout import document
from ultrabench.launchers.open_sweep import folder_of, in_force, require_same, sweep_json_of
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.store.sweep_json import write_sweep_json
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.config.files import describe, files, read_yaml
from ultrabench.sweep.config.load import config_from_tree, load_config, load_hardware, read_hardware
from ultrabench.sweep.plan import make_plan, predictor
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.refusals import refusal
from ultrabench.sweep.running.standings import RATE_OVER_BF16

pytestmark = pytest.mark.usefixtures("alone")

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


def hardware_of(name):
    """The hardware of a file, without the rest of a configuration."""
    return read_hardware({"name": name, **read_yaml(files("hardware")[name])})


RATES = {
    "h100x8": (989e12, 79.1, 450e9), "h100-pcie-x8": (756e12, 79.1, 64e9), "h100-nvl-x8": (835e12, 93.0, 64e9),
    "h100-96gb-x8": (989e12, 95.04, 450e9),
    "h200x8": (989e12, 139.8, 450e9), "a100-80x8": (312e12, 79.2, 300e9), "a100-40x8": (312e12, 39.5, 300e9),
    "b200x8": (2.25e15, 178.4, 900e9), "gb200x4": (2.5e15, 184.3, 900e9), "l40s-x8": (362.05e12, 44.5, 32e9),
    "mi300x-x8": (1307.4e12, 192, 448e9), "mi325x-x8": (1307.4e12, 256, 448e9), "mi355x-x8": (2516.6e12, 288, 537.6e9),
    "h200-nvl-x8": (835.5e12, 139.8, 64e9), "b300x8": (2.25e15, 267.5, 900e9), "gb300x4": (2.5e15, 276.9, 900e9),
}  # fmt: skip
"""Of one GPU the dense bf16 products in FLOP/s and the links in bytes/s of the data sheets,
and the GiB that torch reports."""


@pytest.mark.parametrize("name", [name for name in files("hardware") if name != "cpu"])
def test_every_file_of_a_gpu_has_a_source_and_the_rates_of_the_data_sheet(name):
    hardware = hardware_of(name)
    assert hardware.source.startswith("https://")
    assert hardware.architecture
    rates = (hardware.peak_flops_per_s["bf16"], hardware.mem_bytes / 2**30, hardware.link_bytes_per_s)
    assert rates == pytest.approx(RATES[name], rel=2e-3)
    assert hardware.peak_flops_per_s["bf16"] > hardware.peak_flops_per_s["fp32"]


def test_no_two_files_hold_the_rates_of_one_gpu():
    gpus = [read_yaml(path)["gpu"] for path in files("hardware").values()]
    assert len(gpus) == len(set(gpus))


def test_a_gpu_of_the_users_own_is_planned_and_recorded():
    write_config("hardware/toasters", OURS)
    config = load_config(["hardware=toasters", "model=tiny", "sweep.nodes=[1]"])
    assert (config.hardware.gpu, config.hardware.device) == ("Toaster-9000", "cuda")
    assert make_plan(config).runs
    Path("ultrabench/hardware/toasters.yaml").unlink()  # what was launched does not need the file
    assert config_from_tree(config.resolved).hardware == config.hardware
    assert read_hardware(to_dict(config.hardware)) == config.hardware


def test_a_sweep_from_before_architectures_and_with_another_text_of_its_source_goes_on(tmp_path):
    config = load_config(["hardware=h100x8", "model=tiny"])
    other = {"architecture": None, "rated_power_w": None, "source": "the same rates in other words"}
    older = replace(config, hardware=replace(config.hardware, **other))
    require_same(sweep_json_of(older, {}), config, tmp_path)


def test_a_sweep_keeps_the_memory_of_gpus_that_it_began_with_and_says_so(tmp_path):
    words = ["hardware=h100x8", "model=tiny", "results_dir=here", "name=began"]
    config, warned = load_config(words), []
    older = replace(config, hardware=replace(config.hardware, mem_bytes=80 * 2**30))
    folder_of(config).create()
    write_sweep_json(folder_of(config), sweep_json_of(older, {}))
    resumed = in_force(config, warned.append)
    require_same(sweep_json_of(older, {}), resumed, tmp_path)
    assert config_from_tree(resumed.resolved).hardware == resumed.hardware == older.hardware
    assert warned == [
        "sweep began was launched with 80 GiB per GPU, hardware=h100x8 now has 79.1094 GiB; its predictions keep "
        "using 80 GiB: to use 79.1094 GiB, start a new sweep with name=NAME"
    ]
    other = replace(config, hardware=replace(config.hardware, name="other"))
    assert in_force(other, warned.append).hardware.mem_bytes == config.hardware.mem_bytes


def test_another_node_of_a_known_gpu_names_the_gpu_only():
    write_config("hardware/toasters", OURS)
    write_config("hardware/toastersx4", "gpu: Toaster-9000\ngpus_per_node: 4\n")
    write_config(
        "hardware/pair", "gpu: H100-SXM\ngpus_per_node: 2\nnode_link_bytes_per_s: 1.0e10\nmem_bytes: null\n"
    )
    four, pair = (load_config([f"hardware={n}", "sweep.nodes=[1]"]).hardware for n in ("toastersx4", "pair"))
    assert (four.name, four.gpus_per_node, four.mem_bytes) == ("toastersx4", 4, 24 * 10**9)
    assert (pair.gpus_per_node, pair.node_link_bytes_per_s, pair.mem_bytes) == (
        2,
        1e10,
        hardware_of("h100x8").mem_bytes,
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("source: https://example.org/toaster\n", ""), "unknown hardware.gpu 'Toaster-9000'"),
        ((OURS[OURS.index("link_bytes") : OURS.index("gpus_per_node")], ""),
         "for a new GPU, add to its file: link_bytes_per_s, reported_as, source"),
        (("{bf16: 1.0e14}", "{}"), "lacks peak_flops_per_s or reported_as"),
        (("[ACME Toaster 9000]", "[]"), "lacks peak_flops_per_s or reported_as"),
        (("mem_bytes: 24000000000\n", ""), "hardware lacks the key mem_bytes"),
        (("mem_bytes: 24000000000", "mem_bytes: 24XB"), "hardware.mem_bytes='24XB' is not a number of bytes, "
        "such as 80000000000, 80GB or 80GiB"),
        (("3.2e10", "450"), "link_bytes_per_s=450; must be 1e8 to 1e14 bytes per second, such as 4.5e11"),
        (("node_link_bytes_per_s: 1.0e10", "node_link_bytes_per_s: 50"), "node_link_bytes_per_s=50; must be 1e8"),
        (("1.0e12", "4.0"), "hbm_bytes_per_s=4.0; must be 1e9 to 1e15 bytes per second"),
        (("1.0e14", "148"), "bf16=148; must be 1e9 to 1e18 FLOPs per second, such as 9.89e14"),
        (("24000000000", "96"), "mem_bytes=96; must be 268,435,456 to 17,592,186,044,416 bytes, such as 8"),
        (("gpu: ", "architecture: hopper\ngpu: "), "architecture='hopper'; must be a GPU architecture, such as sm_90"),
        (("gpu: ", "power_limit_w: 500.0\ngpu: "), "power_limit_w=500 without rated_power_w; add rated_power_w"),
        (("gpu: ", "rated_power_w: 700.0\npower_limit_w: 9000.0\ngpu: "),
            "power_limit_w=9000 above rated_power_w=700; give"),
        (("gpu: ", "device: tpu\ngpu: "), "hardware.device='tpu'; must be cuda or cpu"),
    ],
)  # fmt: skip
def test_what_is_no_hardware_is_refused_in_one_line(change, line):
    write_config("hardware/toasters", OURS.replace(*change))
    with refused(line):
        hardware_of("toasters")


def test_a_power_limit_slows_down_products_alone_and_counts_as_another_gpu():
    write_config("hardware/limited", "gpu: H100-SXM\npower_limit_w: 350.0\n")
    write_config("hardware/usual", "gpu: H100-SXM\npower_limit_w: 700.0\n")
    h100, limited, usual = map(load_hardware, ("h100x8", "limited", "usual"))
    assert (h100.clock_share, usual.clock_share, usual.gpu_at_limit) == (1.0, 1.0, "H100-SXM")
    assert limited.clock_share == pytest.approx(0.5 ** (1 / 3))
    words = ["model=llama3-8b", "nodes=1", "zero_stage=3", "recompute=full", "compile=false"]
    times, widths = [], []
    for name in ("h100x8", "usual", "limited"):
        prediction = document(*read_run([*words, f"hardware={name}"], PREDICTION_DEFAULTS))
        times.append(prediction["time"])
        widths.append(prediction["step_time_high_s"] / prediction["step_time_s"])
    assert times[0] == times[1]
    changed = {
        part: times[2][part] / times[0][part] for part in ("gemm", "attention", "memory_bound", "optimizer")
    }
    assert changed == pytest.approx(
        {"gemm": 2 ** (1 / 3), "attention": 2 ** (1 / 3), "memory_bound": 1, "optimizer": 1}
    )
    assert widths[0] == widths[1] < widths[2]
    assert "gpu=H100-SXM at 350 W (H100-SXM)" in prediction["unmeasured"]


def test_a_precision_without_a_rate_is_refused():
    write_config("hardware/toasters", OURS)
    with refused(
        "toasters.yaml: peak_flops_per_s of hardware=toasters has no rate for fp64, only for bf16; choose"
    ):
        load_config(["hardware=toasters", "kernel.precision=fp64", "sweep.nodes=[1]"])


@pytest.mark.parametrize("name", [name for name in RATES if not name.startswith("a100")])
def test_fp8_is_twice_as_fast_as_bf16_where_it_is_published(name):
    rates = hardware_of(name).peak_flops_per_s
    assert rates["fp8"] / rates["bf16"] == pytest.approx(RATE_OVER_BF16["fp8"], rel=0.013)


def test_peaks_of_16_bits_are_equal_and_those_of_4_bits_are_only_blackwells():
    hardware_by_name = {name: hardware_of(name) for name in RATES}
    for name, hardware in hardware_by_name.items():
        rates = hardware.peak_flops_per_s
        assert rates["fp16"] == rates["bf16"], name
        assert rates.get("mxfp8", rates.get("fp8")) == rates.get("fp8"), name
        assert ("nvfp4" in rates) == ((hardware.compute_capability or 0) >= 100), name
        ratio = {"sm_100": 4, "sm_103": 6}.get(
            hardware.architecture, 0
        )  # of dense rates; Blackwell and its Ultra
        assert rates.get("nvfp4", 0) / rates["bf16"] == ratio <= RATE_OVER_BF16["nvfp4"], name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["kernel=megatron", "hardware=h100x8", "kernel.precision=nvfp4"],
         "peak_flops_per_s of hardware=h100x8 has no rate for nvfp4, only for bf16, fp16, fp32, fp64, fp8; choose"),
        (["hardware=b200x8", "kernel.precision=mxfp8"],
         "kernel.precision=mxfp8 with kernel=embedded; choose fp32, bf16, fp8, fp64 or a program of your own"),
        (["hardware=b200x8", "kernel.precision=[bf16,nvfp4]"], "kernel.precision=nvfp4 with kernel=embedded"),
        (["hardware=h100x8", "kernel.precision=fp16"], "kernel.precision=fp16 with kernel=embedded"),
        (["hardware=h100x8", "+hardware.nvlink_domain=12"],
         "hardware.nvlink_domain=12 with gpus_per_node=8; give a multiple of 8, or leave it out"),
    ],
)  # fmt: skip
def test_formats_and_domains_that_do_not_exist_are_refused(words, line):
    with refused(line):
        load_config(["model=tiny", "sweep.nodes=[1]", *words])


def test_a_program_of_the_user_may_have_any_format_with_a_rate():
    words = ["model=tiny", "sweep.nodes=[1]", "kernel=command", "kernel.command=[train]", "hardware=b200x8"]
    runs = make_plan(load_config([*words, "kernel.precision=[fp16,fp8,mxfp8,nvfp4]"])).runs
    peaks = {run.spec.kernel.precision: run.peak_flops_per_s for run in runs}
    assert peaks == {"fp16": 2.25e15, "fp8": 4.5e15, "mxfp8": 4.5e15, "nvfp4": 9e15}


def test_groups_within_an_nvlink_domain_use_its_links():
    """On 16 nodes of four GPUs, all in one domain of 18 nodes."""
    rack = load_hardware("gb200x4")
    node_only = replace(rack, nvlink_domain=None)
    assert (rack.nvlink_gpus, node_only.nvlink_gpus) == (72, 4)
    arguments = ["model=qwen3-235b-a22b", "nodes=16", "mbs=1"]

    def parts_of(hardware, *words):
        spec, config = read_run(
            [*arguments, *words], PREDICTION_DEFAULTS | {"hardware": "gb200x4"}, any_model=True
        )
        predicts = predictor(replace(config, hardware=hardware), 16, hardware.peak("bf16", 16, None, 1))
        # Waiting for the slowest stage hides the exchanges of a pipeline, so that only their ratio tells.
        return predicts.step_time(spec, ())._asdict() | {"pp": predicts.communication_ratios(spec).get("pp")}

    words_by_part = {
        "tp": ("tp=8", "gas=1"),
        "ep": ("ep=64", "gas=1"),
        "cp": ("cp=8", "gas=1"),
        "pp": ("tp=4", "pp=4", "gas=8"),
        "dp": ("tp=4", "pp=2", "gas=2"),
    }
    for part, words in words_by_part.items():
        inside, outside = (parts_of(hardware, *words)[part] for hardware in (rack, node_only))
        assert inside < outside, part
    # Twice as many ranks do not lie in one domain; a half of what each sends leaves it.
    links, far = network(rack, 64), rack.node_link_bytes_per_s * 0.75
    assert links.alltoall_s(2**30, 128) == pytest.approx(64 / 128 * 2**30 / far)
    assert links.alltoall_s(2**30, 64) == pytest.approx(63 / 64 * 2**30 / (0.75 * 9e11))
    measured = network(rack, 16, alltoall_bytes_per_s=4e11, alltoall_intra_node_bytes_per_s=5e11)
    assert measured.alltoall_s(2**30, 64) == pytest.approx(63 / 64 * 2**30 / 4e11)


def test_a_program_says_how_far_its_groups_reach():
    words = [
        "model=tiny-moe",
        "sweep.nodes=[32]",
        "kernel=command",
        "kernel.command=[train]",
        "hardware=gb200x4",
    ]
    config = load_config([*words, "kernel.spans={tp: node, ep: nvlink_domain, cp: 2}"])
    shape, kernel, hardware = config.models[0], config.kernel, config.hardware

    def reason(**axes):
        return refusal(kernel, Layout(**axes), shape, 4096, "cuda", hardware)

    assert reason(dp=32, tp=4, ep=8) is None
    assert reason(dp=16, tp=8) == (
        "kernel command has groups of tp only within a node, of 4 GPUs; those of tp=8 span several"
    )
    assert reason(dp=128, ep=128) == (
        "kernel command has groups of ep only within an NVLink domain, of 72 GPUs; those of ep=128 span several"
    )
    assert reason(dp=32, cp=4) == "kernel command has groups of cp of at most 2 ranks; cp=4"


def test_megatron_is_refused_groups_that_its_libraries_cannot_span():
    config = load_config(["model=tiny-moe", "sweep.nodes=[32]", "kernel=megatron", "hardware=gb300x4"])
    rack, single_nodes = config.hardware, hardware_of("h100x8")

    def reason(hardware, axes, **knobs):
        layout, variant = (
            Layout(**{"zero_stage": 1} | axes),
            {f"flags.{knob}": v for knob, v in knobs.items()},
        )
        return refusal(config.kernel, layout, config.models[0], 4096, "cuda", hardware, variant=variant)

    experts, rows = {"dp": 128, "ep": 128}, {"dp": 8, "tp": 16}
    assert reason(rack, experts) is None
    assert reason(rack, experts, dispatcher="hybridep") == (
        "kernel megatron with dispatcher=hybridep has groups of ep only within an NVLink domain, of 72 GPUs; "
        "those of ep=128 span several"
    )
    assert reason(rack, experts | {"zero_stage": 0}, dispatcher="hybridep") == reason(
        rack, experts, dispatcher="hybridep"
    )
    assert reason(rack, {"dp": 128, "ep": 64}, dispatcher="hybridep") is None
    assert reason(single_nodes, experts, dispatcher="hybridep") is None
    assert reason(single_nodes, {"dp": 256, "ep": 256}, dispatcher="deepep") == (
        "kernel megatron with dispatcher=deepep has groups of ep of at most 160 ranks; ep=256"
    )
    assert reason(single_nodes, rows) is None
    assert reason(rack, rows, tp_overlap="on") is None
    assert reason(single_nodes, rows, tp_overlap="on") == (
        "kernel megatron with tp_overlap=on has groups of tp only within an NVLink domain, of 8 GPUs; "
        "those of tp=16 span several"
    )


def test_fp8_is_planned_on_hardware_that_has_it():
    words = ["model=tiny", "sweep.nodes=[1]", "kernel.precision=fp8"]
    with refused("A100-SXM-80GB is sm_80: use precision=bf16"):
        load_config([*words, "hardware=a100-80x8"])
    assert load_config([*words, "hardware=h100x8"]).kernel.precision == "fp8"
    assert load_config([*words, "hardware=cpu"]).hardware.peak("fp8", 1, 1e10, 2).flops_per_s == 1e10
    write_config("hardware/toasters", OURS.replace("bf16:", "fp8:"))
    with refused("peak_flops_per_s of hardware=toasters has fp8 but no bf16"):
        hardware_of("toasters")


@pytest.mark.parametrize("broken", [b"gpu: X\n  bad: [open\n", b"\xff\xfe", b"- a\n"])
def test_a_broken_file_breaks_no_other_hardware(broken):
    write_config("hardware/toasters", OURS)
    write_config("hardware/toastersx4", "gpu: Toaster-9000\ngpus_per_node: 4\n")
    Path("ultrabench/hardware/broken.yaml").write_bytes(broken)
    assert [hardware_of(name).name for name in ("toastersx4", "h100x8")] == ["toastersx4", "h100x8"]
    with refused("broken"):
        load_config(["hardware=broken"])
    described = describe("hardware")
    assert described["toasters"] == "Two of our own GPUs."
    assert described["broken"].startswith("unusable: ")
    assert "\n" not in described["broken"]
