import re
from pathlib import Path

import pytest

import ultrabench
from tests.configs import slurm as configured
from ultrabench.errors import ConfigError
from ultrabench.store.events import Launched
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.sweep.config.load import CLUSTER_KEYS, config_from_tree, load_config

TEXTS = ("partition", "account", "qos", "exclude", "gres", "mem")
TREE = load_config(["launcher=slurm"]).resolved


def slurm(*overrides):
    return load_config(["launcher=slurm", *overrides]).launcher


def composed(**values):
    """The launcher of a composed tree with these values in it."""
    return config_from_tree({**TREE, "launcher": {**TREE["launcher"], **values}}).launcher


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Writes ./ultrabench/cluster/mine.yaml; gives the launcher's values that come of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))
    path = tmp_path / "ultrabench/cluster/mine.yaml"
    path.parent.mkdir(parents=True)

    def choose(text, *overrides):
        path.write_text(text)
        return slurm("cluster=mine", *overrides)

    return choose


def test_the_defaults_are_kind_to_others():
    choice = composed()
    assert (choice.name, choice.max_jobs, choice.max_nodes, choice.nice) == ("slurm", 8, None, 1000)
    assert (choice.exclusive, choice.requeue, choice.control, choice.preflight) == (True, False, True, True)
    assert {getattr(choice, key) for key in TEXTS} == {None}
    assert (choice.python, choice.setup, choice.srun, choice.environment) == ((), (), (), ())
    local = load_config([]).launcher
    assert (local.name, local.max_jobs, local.nice, local.exclusive) == ("local", 1, None, False)


def test_a_cluster_feeds_the_launcher(cluster):
    choice = cluster(
        "name: mine\npartition: hopper\naccount: proj\nqos: low\nsbatch: {constraint: h100&nvme}\n"
        "exclude: gpu[03,07]\ngres: gpu:h100:8\nmem: 500G\ncpus: 96\npython: /opt/venv/bin/python\n"
        "setup: ['module load cuda/12.8', 'ulimit -c 0']\n"
    )
    assert (choice.partition, choice.account, choice.qos) == ("hopper", "proj", "low")
    assert (choice.exclude, choice.gres) == ("gpu[03,07]", "gpu:h100:8")
    assert choice.sbatch == {"constraint": "h100&nvme"}
    assert (choice.mem, choice.cpus, choice.python) == ("500G", 96, ("/opt/venv/bin/python",))
    assert choice.setup == ("module load cuda/12.8", "ulimit -c 0")


def test_a_key_that_no_launcher_takes_is_told(cluster):
    for key, hint in (("partion", "did you mean partition?"), ("nice", "known: ")):
        with pytest.raises(ConfigError, match=rf"unknown key of cluster=mine '{key}'.*{hint}"):
            cluster(f"{key}: hopper\n")
    package = Path(ultrabench.__file__).parent / "configs"
    taken = re.findall(r"cluster\.(\w+)", (package / "launcher/slurm.yaml").read_text())
    assert {"name", "sbatch", *taken} == CLUSTER_KEYS


def test_options_of_sbatch_add_to_those_of_the_cluster(cluster):
    file = "sbatch: {constraint: h100, qos-hint: a, hold: true}\n"
    choice = cluster(file, "+launcher.sbatch={qos-hint:b}", "+launcher.sbatch.mail-type=FAIL")
    assert choice.sbatch == {"constraint": "h100", "qos-hint": "b", "hold": "", "mail-type": "FAIL"}
    assert load_config(["cluster=mine", "launcher=local"]).launcher.sbatch == {}


@pytest.mark.parametrize("key", ["reservation", "constraint"])
def test_options_that_had_a_key_of_their_own_are_told_where_they_are_now(cluster, key):
    for refused in (
        lambda: slurm(f"launcher.{key}=x"),
        lambda: composed(**{key: "x"}),
        lambda: cluster(f"{key}: x\n"),
    ):
        with pytest.raises(ConfigError, match=rf"write \+launcher\.sbatch\.{key}=VALUE"):
            refused()


def test_what_the_command_line_says_wins(cluster):
    choice = cluster(
        "name: mine\npartition: hopper\n", "launcher.partition=debug", "launcher.python=[env,python]"
    )
    assert (choice.partition, choice.python) == ("debug", ("env", "python"))


@pytest.mark.parametrize("text", ["", "name: null\n"])
def test_an_empty_cluster_says_nothing(cluster, text):
    assert cluster(text) == composed()
    assert load_config(["cluster=mine"]).cluster == "mine", "whatever its file says"


def test_names_of_digits_are_names(cluster):
    assert cluster("name: mine\naccount: 1234\n", "launcher.mem=0").account == "1234"
    for key in TEXTS:
        assert getattr(composed(**{key: 1234}), key) == "1234"
        assert getattr(composed(**{key: 0}), key) == "0"


def test_an_empty_text_is_none():
    assert slurm("launcher.partition=", "launcher.python=") == composed()
    assert [composed(nice=nice).nice for nice in (None, 0, -5)] == [None, 0, -5]
    for key in (*TEXTS, "python", "max_nodes", "time_minutes"):
        assert composed(**{key: ""}) == composed(**{key: None}) == composed()


@pytest.mark.parametrize(
    ("key", "value"), [("partition", True), ("account", 1.5), ("mem", ["1"]), ("qos", {})]
)
def test_what_is_no_name_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"launcher\.{key}="):
        composed(**{key: value})


@pytest.mark.parametrize(
    ("given", "sbatch"),
    [
        ({"mail-type": "FAIL", "switches": "1@10"}, {"mail-type": "FAIL", "switches": "1@10"}),
        ({"requeue": ""}, {"requeue": ""}), ({"requeue": None}, {"requeue": ""}),
        ({"requeue": True}, {"requeue": ""}), ({"requeue": False}, {}), ({"priority": 5}, {"priority": "5"}),
        (None, {}),
    ],
)  # fmt: skip
def test_options_of_sbatch(given, sbatch):
    assert composed(sbatch=given).sbatch == sbatch


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("launcher.sbatch.foo=1", r"write \+launcher\.sbatch\.NAME=VALUE"),
        ("launcher.sbatch={foo:1}", r"write \+launcher\.sbatch\.NAME=VALUE"),
        ("launcher.sbatch.--foo=1", "without dashes in front"),
        ("+launcher.sbatch.-f=1", "without dashes in front"),
        ("+launcher.sbatch={--foo:1}", "without dashes in front"),
        ("launcher.sbatch=[a]", "launcher.sbatch"),
    ],
)
def test_options_written_differently_are_explained(override, text):
    with pytest.raises(ConfigError, match=text):
        slurm(override)


@pytest.mark.parametrize("key", ["array", "job-name", "nodes", "ntasks-per-node", "parsable", "wait", "wrap"])
def test_options_that_a_launch_rests_on_are_refused(key):
    with pytest.raises(ConfigError, match=rf"launcher\.sbatch\.{key}"):
        configured(sbatch={key: "1"})


@pytest.mark.parametrize("key", ["--foo", "-p", "Foo", "foo bar", "foo=1", "foo\n", "", "foo;x", "1"])
def test_names_of_options_are_names(key):
    with pytest.raises(ConfigError, match="without dashes in front"):
        configured(sbatch={key: "1"})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("pack", 0), ("max_jobs", 0), ("max_nodes", 0), ("cpus", 0), ("time_minutes", 0), ("heartbeat_s", 0.4),
        ("poll_s", 0.0), ("grace_s", -1.0), ("allocation_minutes", 0.0), ("allocation_minutes", -1.0),
        *((word, value) for word in ("allocation_minutes", "heartbeat_s", "poll_s", "grace_s")
          for value in (float("nan"), float("inf"))),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_used(word, value):
    with pytest.raises(ConfigError, match=rf"launcher\.{word}=.*must be"):
        configured(**{word: value})


@pytest.mark.parametrize(
    "window",
    ["7-9", "24:00-07:00", "19:60-07:00", "19:00", "19:00-07:00 ", "19:00 - 07:00", "9:00-17:00", "", "\u0661\u0669:00-07:00"],
)  # fmt: skip
def test_windows_that_are_none(window):
    with pytest.raises(ConfigError, match=r"must be HH:MM-HH:MM"):
        configured(window=window)


@pytest.mark.parametrize("line_break", ["\n", "\r", "\0"])
@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("partition", str), ("exclude", str), ("setup", lambda s: (s,)), ("srun", lambda s: ("a", s)),
        ("python", lambda s: (s,)), ("environment", lambda s: (s,)), ("sbatch", lambda s: {"comment": s}),
    ],
)  # fmt: skip
def test_a_value_is_one_line(word, make, line_break):
    with pytest.raises(ConfigError, match=rf"launcher\.{word}(\.comment)?=.*must be one line"):
        configured(**{word: make(f"a{line_break}rm -r x")})


def test_a_sweep_is_continued_with_the_same_launcher(tmp_path):
    config = load_config(
        ["launcher=slurm", "launcher.nice=null", "launcher.python=[a b,c]", "+launcher.sbatch.requeue=",
         "launcher.mem=0", "launcher.window=19:00-07:00"]
    )  # fmt: skip
    JournalWriter(tmp_path, "launcher").write(Launched(generation=1, config=config.resolved))
    (line,) = read_journal(tmp_path)
    assert config_from_tree(line.event.config).launcher == config.launcher
