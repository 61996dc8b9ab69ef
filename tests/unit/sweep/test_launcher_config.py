import re
from pathlib import Path

import pytest

import ultrabench
from tests.configs import expected, refused, write_config
from ultrabench.errors import ConfigError
from ultrabench.sweep.config.launcher_config import CLUSTER_KEYS, SBATCH_TEXTS
from ultrabench.sweep.config.load import config_from_tree, load_config

TREE = load_config(["launcher=slurm"]).resolved


def composed(**values):
    """The launcher of a composed tree with these values in it."""
    return config_from_tree({**TREE, "launcher": {**TREE["launcher"], **values}}).launcher


pytestmark = pytest.mark.usefixtures("alone")


def cluster(text, *overrides):
    """The launcher's values that come of a file of a cluster."""
    write_config("cluster/mine", text)
    return load_config(["launcher=slurm", "cluster=mine", *overrides]).launcher


def test_the_defaults_are_kind_to_others():
    choice = composed()
    assert (choice.name, choice.max_jobs, choice.max_nodes, choice.slurm.nice) == ("slurm", 8, None, 1000)
    assert (choice.slurm.exclusive, choice.slurm.requeue, choice.control, choice.preflight) == (
        True,
        False,
        True,
        True,
    )
    assert {getattr(choice.slurm, key) for key in SBATCH_TEXTS} == {choice.window} == {None}


def test_a_cluster_feeds_the_launcher_and_the_command_line_wins():
    choice = cluster(
        "name: mine\npartition: hopper\naccount: 1234\nqos: low\n"
        "sbatch: {constraint: h100&nvme, qos-hint: a, hold: true}\n"
        "exclude: gpu[03,07]\ngres: gpu:h100:8\nmem: 500G\ncpus: 96\npython: /opt/venv/bin/python\n"
        "setup: ['module load cuda/12.8', 'ulimit -c 0']\n",
        "launcher.partition=debug", "+launcher.sbatch={qos-hint:b}", "+launcher.sbatch.mail-type=FAIL",
    )  # fmt: skip
    settings = choice.slurm
    assert (settings.partition, settings.account, settings.qos) == ("debug", "1234", "low")
    assert (settings.exclude, settings.gres) == ("gpu[03,07]", "gpu:h100:8")
    assert settings.sbatch == {"constraint": "h100&nvme", "qos-hint": "b", "hold": "", "mail-type": "FAIL"}
    assert (settings.mem, settings.cpus, choice.python) == ("500G", 96, ("/opt/venv/bin/python",))
    assert settings.setup == ("module load cuda/12.8", "ulimit -c 0")
    assert load_config(["cluster=mine", "launcher=local"]).launcher.slurm.sbatch == {}


@pytest.mark.parametrize(
    ("key", "message"),
    [("partion", "unknown key of cluster=mine 'partion'; did you mean partition?"),
     ("nice", "unknown key of cluster=mine 'nice' (known: "), ("price_per_gpu_hour", "price_per_gpu_hour='hopper'"),
     ("mem", "launcher.mem='hopper'; must be a whole number with K, M, G or T, such as 500G"),
     ("constraint", "write +launcher.sbatch.constraint=VALUE")],
)  # fmt: skip
def test_a_key_that_no_launcher_takes_is_told(key, message):
    with refused(message):
        cluster(f"{key}: hopper\n")


def test_every_key_of_a_cluster_is_taken():
    text = (Path(ultrabench.__file__).parent / "configs/launcher/slurm.yaml").read_text()
    assert {"name", "sbatch", "price_per_gpu_hour", *re.findall(r"cluster\.(\w+)", text)} == CLUSTER_KEYS


@pytest.mark.parametrize("text", ["", "name: null\n"])
def test_an_empty_cluster_says_nothing(text):
    assert cluster(text) == composed()
    assert load_config(["cluster=mine"]).cluster == "mine", "whatever its file says"


@pytest.mark.parametrize("key", SBATCH_TEXTS)
def test_names_of_digits_are_names(key):
    assert [getattr(composed(**{key: number}).slurm, key) for number in (1234, 0)] == ["1234", "0"]


@pytest.mark.parametrize("key", [*SBATCH_TEXTS, "python", "max_nodes", "time_minutes", "window"])
def test_an_empty_text_is_none(key):
    assert composed(**{key: ""}) == composed(**{key: None}) == composed()


@pytest.mark.parametrize(
    ("options", "sbatch"),
    [
        ({"mail-type": "FAIL", "switches": "1@10"}, {"mail-type": "FAIL", "switches": "1@10"}), (None, {}),
        *(({"requeue": flag}, {"requeue": ""}) for flag in ("", None, True)), ({"requeue": False}, {}),
        ({"priority": 5}, {"priority": "5"}),
    ],
)  # fmt: skip
def test_options_of_sbatch(options, sbatch):
    assert composed(sbatch=options).slurm.sbatch == sbatch


@pytest.mark.parametrize(
    ("override", "text"),
    [
        *((f"launcher.{key}=x", f"write +launcher.sbatch.{key}=VALUE") for key in ("reservation", "constraint")),
        ("launcher.sbatch.foo=1", "write +launcher.sbatch.NAME=VALUE"),
        ("launcher.sbatch={foo:1}", "write +launcher.sbatch.NAME=VALUE"), ("launcher.sbatch=[a]", "launcher.sbatch"),
        ("+launcher.sbatch={--foo:1}", "without leading dashes"),
        *((dashed, "a key consists of names joined by dots") for dashed in (
            "launcher.sbatch.--foo=1", "+launcher.sbatch.-f=1")),
    ],
)  # fmt: skip
def test_options_written_differently_are_explained(override, text):
    with refused(text):
        load_config(["launcher=slurm", override])


BREAK = "a\nrm -r x"
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({key: 0}, f"launcher.{key}=0; must be >= 1") for key in ("pack", "max_jobs", "max_nodes", "cpus",
            "time_minutes")),
        *(({key: bad}, f"launcher.{key}={bad}; must be") for key, least in (
            ("heartbeat_s", 0.4), ("poll_s", 0.0), ("grace_s", -1.0), ("allocation_minutes", 0.0)) for bad in (least,
            NAN, INF)),
        *(({"window": window}, "must be HH:MM-HH:MM") for window in (
            "7-9", "24:00-07:00", "19:60-07:00", "19:00", "19:00-07:00 ", "19:00 - 07:00", "9:00-17:00",
            "\u0661\u0669:00-07:00")),
        *(({"sbatch": {key: "1"}}, f"launcher.sbatch.{key}; ultrabench sets this option") for key in (
            "array", "job-name", "nodes", "ntasks-per-node", "parsable", "wait", "wrap")),
        *(({"sbatch": {key: "1"}}, "without leading dashes") for key in (
            "--foo", "-p", "Foo", "foo bar", "foo=1", "foo\n", "", "foo;x", "1")),
        ({"exclude": "a\rb"}, "must be one line"), ({"exclude": "a\0b"}, "launcher.exclude has a NUL as character 2"),
        *(({key: BREAK}, "must be one line") for key in SBATCH_TEXTS if key != "mem"),
        ({"mem": BREAK}, "a whole number with"),
        *(({key: ("a", BREAK)}, "must be one line") for key in ("setup", "srun", "python", "environment")),
        ({"sbatch": {"comment": BREAK}}, "must be one line"),
        ({"constraint": "x"}, "write +launcher.sbatch.constraint=VALUE"),
        *(({key: value}, f"launcher.{key}=") for key, value in (
            ("partition", True), ("account", 1.5), ("mem", ["1"]), ("qos", {}))),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        composed(**values)
    expected(" ".join(str(raised.value).split()))  # as the command line prints it


@pytest.mark.parametrize(
    ("words", "measures"),
    [
        ([], True), (["kernel=command", "kernel.command=[a]"], False),
        (["kernel=command", "kernel.command=[a]", "hardware=h100x8"], True),
        (["kernel=command", "kernel.command=[a]", "launcher.preflight=true"], True),
        (["launcher.preflight=false"], False),
    ],
)  # fmt: skip
def test_a_local_preflight_is_left_out_where_it_alone_would_need_torch(words, measures):
    assert load_config(words).launcher.preflight is measures
