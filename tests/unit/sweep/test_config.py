import json
from copy import deepcopy
from dataclasses import replace
from functools import cache, reduce
from operator import attrgetter, getitem
from pathlib import Path

import pytest
import yaml

from tests.configs import expected, refused, write_config
from ultrabench.errors import ConfigError
from ultrabench.launchers.open_sweep import folder_of, in_force, sweep_json_of
from ultrabench.record import to_dict
from ultrabench.store.sweep_json import write_sweep_json
from ultrabench.sweep.config.files import CONFIG_GROUPS, describe, files, search_path
from ultrabench.sweep.config.load import config_from_tree, load_config, load_model

pytestmark = pytest.mark.usefixtures("alone")


@cache
def shipped(*overrides):
    """A configuration of the package's files only."""
    return load_config(overrides)


@cache
def refusal(*overrides):
    """The message about overrides that cannot be used with the package's files; None where they can.

    Several tests ask for the same ones, and each composition takes a fifth of a second.
    """
    try:
        load_config(overrides)
    except ConfigError as error:
        expected(str(error), overrides)
        return str(error)
    return None


TREE = shipped("model=tiny").resolved
MODEL = """# A model of mine.
hidden_size: 128
num_hidden_layers: {layers}
num_attention_heads: 4
num_key_value_heads: 4
intermediate_size: 256
vocab_size: 512
tie_word_embeddings: false
"""


def test_the_strongest_folder_wins():
    for folder, layers in (("../user", 8), ("ultrabench", 9)):
        write_config("model/tiny", MODEL.format(layers=layers), folder)
        assert load_model("tiny").num_hidden_layers == layers
    assert load_config(["model=tiny"]).models == (load_model("tiny"),)
    assert describe("model")["tiny"] == "A model of mine."
    assert list(files("model")).count("tiny") == 1


@pytest.mark.parametrize("where", ["ultrabench", "../user"])
def test_other_groups_of_the_user_are_found(where):
    write_config("hardware/ours", "gpu: H200-SXM\ngpus_per_node: 4\nnode_link_bytes_per_s: 2.5e10\n", where)
    config = load_config(["hardware=ours", "kernel.precision=bf16", "sweep.nodes=[1]"])
    assert (config.name, config.hardware.gpu) == ("layouts-ours", "H200-SXM")


def test_a_folder_of_that_name_without_configuration_is_ignored():
    write_config("docs/readme", "x: 1")
    Path("ultrabench/model").mkdir()
    assert [p.name for p in search_path()] == ["configs"]


H100, COMMAND = "hardware=h100x8", ("kernel=command", "kernel.command=[x]")
SECONDS = "measure.warmup_s measure.min_s"


@pytest.mark.parametrize(
    ("overrides", "settings", "values"),
    [
        # A sweep brings its hardware, but the user's wins; GPUs get the sweep for real models unless a sweep is named.
        ([], "name workload.seq_len", ("quick-cpu", 64)), (["hardware=cpu"], "name", "quick-cpu"),
        (["sweep=playbook"], "name hardware.name", ("playbook-h100x8", "h100x8")),
        (["sweep=playbook", "hardware=h200x8"], "name hardware.name", ("playbook-h200x8", "h200x8")),
        (["hardware=h200x8", "sweep=playbook"], "name hardware.name", ("playbook-h200x8", "h200x8")),
        (["model=1B", "hardware=h200x8"], "name workload.seq_len", ("layouts-h200x8", 4096)),
        (["hardware=h200x8", "sweep=quick"], "name workload.seq_len", ("quick-h200x8", 64)),
        (["sweep=layouts"], "hardware.name", "h100x8"), (["name=mine", "repeats=3"], "name repeats", ("mine", 3)),
        # So does the precision; layers are compiled on GPUs, but those of a program only if it says so.
        ([], "kernel.precision kernel.compile trace", ("fp32", False, False)), (["trace=true"], "trace", True),
        (["sweep=playbook"], "kernel.precision kernel.compile", ("bf16", True)),
        (["kernel.compile=true"], "kernel.compile", True), ([H100, "kernel.compile=false"], "kernel.compile", False),
        (["kernel=torchtitan", "model=llama3-8b", H100], "kernel.compile", False),
        # The profile is that of the kernel or the named one.
        ([], "profile.name", "ultrabench-cpu"), ([H100], "profile.name", "ultrabench"),
        ([H100, "kernel=megatron"], "profile.name", "megatron"),
        ([H100, "profile=nanotron"], "profile.name", "nanotron"),
        # Seconds of measuring are those of the hardware unless given.
        ([], SECONDS, (0, 0)), ([H100], SECONDS, (5, 10)), ([H100, *COMMAND], SECONDS, (0, 0)),
        (["measure.min_s=1.5"], SECONDS, (0, 1.5)),
        ([H100, "measure=quick", "measure.warmup_s=0", "hardware.min_s=30"], SECONDS, (0, 30)),
        ([], "strategy batch", ("exhaustive", 4)), (["sweep.strategy=adaptive"], "strategy batch", ("adaptive", 4)),
    ],
)  # fmt: skip
def test_what_follows_from_the_overrides(overrides, settings, values):
    assert attrgetter(*settings.split())(shipped(*overrides)) == values


def test_any_sweep_can_be_searched():
    write_config("sweep/own", "models: [tiny]\nnodes: [1]\nseq_len: 64\ngbs: 8\nmbs: [1]\n")
    assert load_config(["sweep=own", "sweep.strategy=adaptive"]).batch == 4


def test_one_value_is_a_list_of_one():
    assert [m.name for m in load_config(["sweep.models=[tiny,mini]"]).models] == ["tiny", "mini"]
    assert load_config(["sweep.tp=2"]).axes.layout["tp"] == (2,)


def test_the_profile_stands_in_the_record():
    config = shipped("hardware=h100x8", "profile=nanotron")
    frozen = deepcopy(config.resolved)
    frozen["profile"]["time"]["rest_s"] = 7.0
    time = replace(config.profile.time, rest_s=7.0)
    assert config_from_tree(frozen).profile == replace(config.profile, time=time)
    del frozen["profile"]["time"]["rest_s"]
    assert config_from_tree(frozen).profile == config.profile, "constants of another version are read again"


def test_a_resolved_configuration_is_the_configuration():
    words = ["sweep=playbook", "model=8B", "launcher=slurm", "launcher.nice=null", "launcher.python=[a b,c]"]
    config = load_config(
        [*words, "+launcher.sbatch.requeue=", "launcher.mem=0", "launcher.window=19:00-07:00"]
    )
    assert config_from_tree(json.loads(json.dumps(config.resolved))) == config


@pytest.mark.parametrize("group", CONFIG_GROUPS)
def test_every_option_of_every_group_says_what_it_is(group):
    options = describe(group)
    assert options
    assert all(options.values())


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        *(([f"model={value}"], "model takes one name; for several use sweep.models=[tiny,mini]") for value in (
            "[tiny mini]", "tiny,mini")),
        *(([override], f"{override!r} is not an override; write KEY=VALUE") for override in ("nonsense", "=1")),
        (["sweep.zero_stage=0-3"], "ranges are not supported; write a list, such as sweep.zero_stage=[0,1,2,3]"),
        (["measure.checkpoint=true", *COMMAND], "measure.checkpoint=true with kernel=command; "
        "only ultrabench's own kernel saves its state"),
        *(([override], f"unknown override {override.partition('=')[0]!r}; did you mean {remedy}?") for override,
            remedy in [
            ("node=2", "sweep.nodes=[2]"), ("gbs=8", "sweep.gbs=8"), ("precision=bf16", "kernel.precision=bf16"),
            ("models=8B", "sweep.models=[8B]"), ("repeat=2", "repeats=2"), ("num_nodes=3", "sweep.nodes=[3]"),
            ("global_batch_size=512", "sweep.gbs=512"), ("activation_checkpoint.mode=full", "sweep.recompute=[full]"),
            ("parallelism.pipeline_parallel_schedule=zbv", "sweep.pp_schedule=[zbv]"),
            ("zero_optimization.stage=3", "sweep.zero_stage=[3]"),
        ]),
        *(([f"{key}=8"], "GPUs = nodes * hardware.gpus_per_node: give sweep.nodes=[1,2]") for key in ("sweep.gpus",
            "nproc_per_node")),
        (["n_layers=8"], "the sizes of a model are in its file"),
        (["time=8"], "did you mean launcher.time_minutes=8, with launcher=slurm?"),
        *(([f"sweep.tp={value}"], "a list needs brackets and commas; write sweep.tp=[1,2]") for value in ("{1,2}",
            "[1;2]", "1,2]")),
        (["launcher=slurm", "+launcher.sbatch.constraint=a,b"],
            """needs quotes: '+launcher.sbatch.constraint="a,b"'"""),
        (["sweep.models=null"], "sweep.models is empty; name at least one"),
        (["model=meta-llama/x"], "give the path of a config.json, or a name (see ultrabench configs model)"),
        *(([f"{key}=8"], "dp follows from the GPUs, dp = GPUs/(tp*pp*cp)") for key in ("sweep.dp",
            "data_parallel_size")),
        *(([f"{group}={value}"], f"{group}={value}: a sweep has one {group}; choose it by its name, {group}=NAME")
          for group, value in (("model", ""), ("hardware", ""), ("hardware", "null"), ("hardware", "1"),
              ("hardware", "[cpu,h100x8]"))),
        (["repeats=1,2"], "a sweep has one repeats; run the command once for each: repeats=1, repeats=2"),
        (["sweep.gbs=8,16"], "sweep.gbs=8,16: a list needs brackets and commas; write sweep.gbs=[8,16]"),
        (["measure.partial_steps=4,8"], "a list needs brackets and commas; write measure.partial_steps=[4,8]"),
        (["~hardware"], "a sweep always has a hardware; choose another with hardware=NAME"),
        (["launcher.partition=x"], "launcher.partition is not a setting of the chosen launcher; add launcher=slurm"),
        (["+kernel.env.OMP_NUM_THREADS='\"3\"'"], "kernel.env.OMP_NUM_THREADS: ultrabench sets it for each rank"),
        ([*COMMAND, "+kernel.env.A=1"], """write it with two kinds of quotes: '"1"'"""),
        (["retry.attempts=[3]"], "Error merging override retry.attempts=[3]; see ultrabench configs"),
        (["launcher.sbatch.foo\n=1"], r"'launcher.sbatch.foo\n=1': a key consists of names joined by dots"),
        (["sweep.tp =[1]"], "'sweep.tp =[1]': a key consists of names joined by dots; a name consists"),
        (["name=a\nb"], r"'name=a\nb': a value that contains brackets"),
        (["launcher=slurm", "+launcher.sbatch.qos=[a]"], "launcher.sbatch.qos=['a'] is not a text; give one value"),
        (["sweep.env.ALGO=[a,b]"], "did you mean +sweep.env.ALGO=[a,b]?"),
        (["sweep.node=[1]"], "unknown override 'sweep.node'; did you mean sweep.nodes?"),
        (["kernel=command", "kernel.command=[]"], "kernel.command is empty; give the program"),
        (["retry.attempts.hung=3"], "did you mean retry.attempts.hang?"), (["sweep.nodes=[1"], "sweep.nodes=[1"),
        (["sweep.tp=[1,2,1]"], "sweep.tp=[1,2,1] lists 1 twice; leave one out"),
        (["sweep.gbs=[8,8]"], "sweep.gbs=[8,8] lists 8 twice; leave one out"),
        (["kernel.precision=[fp32,fp32]"], "kernel.precision=[fp32,fp32] lists fp32 twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_told_in_one_line(overrides, line):
    """Others are held to the letter in tests/fixtures/messages.json."""
    message = refusal(*overrides)
    assert line in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sweep.nodes=[]", "sweep.nodes is empty; list at least one value"),
        ("sweep.tp=[1,-2]", "sweep.tp=-2; must be >= 1"),
        ("sweep.zero_stage=[4]", "sweep.zero_stage=4; must be 0 to 3"),
        ("sweep.nodes=null", "sweep lacks nodes"),
        ("sweep.gbs=0", "gbs=0; must be 1 to 1,073,741,824"),
        ("sweep.recompute=[some]", "sweep.recompute='some'; must be none, attention, selective, full or every2"),
        ("sweep.recompute=[every1]", "sweep.recompute='every1'; must be none"),
        ("repeats=0", "repeats=0; must be 1 to 1,000"), ("repeats=2.5", "repeats=2.5 is not an integer"),
        ("name=a/b", "starts with a letter, a digit or"),
        *((f"name={name}", "must be a text of at most 100 ASCII characters") for name in (".hidden", "-x", "50%",
            "x" * 101, "x.parquet", '"a\\tb"')),
        ("hardware.gpus_per_node=0", "hardware.gpus_per_node=0; must be >= 1"),
        ("kernel.compile=maybe", "kernel.compile='maybe'; must be auto, true or false"),
        ("kernel.attention=sdpa", "kernel.attention='sdpa'; must be auto, cudnn, flash, flash3 or math"),
        ("kernel.recompute=full", "kernel.recompute is an axis of layouts; write sweep.recompute=[full]"),
        ("measure.min_s=-1", "measure.min_s=-1; must be >= 0 and finite"),
        ("measure.warmup_steps=0", "measure.warmup_steps=0; must be >= 1"),
        ("measure.deadline_floor_s=.nan", "must be > 0 and finite"),
        ("measure.run_limit_s=.inf", "must be > 0 and finite"),
        ("measure.race=.inf", "must be > 1"), ("measure.confirm=1000", "must be 1 to 100"),
        ("retry.attempts.hang=x", "retry.attempts.hang='x' is not an integer"),
        ("retry.attempts.hang=999999", "must be 0 to 100"), ("retry.breaker=0", "retry.breaker=0"),
        ("retry.backoff_s=.inf", "must be >= 0 and finite"), ("retry.backoff_s=-1", "must be >= 0 and finite"),
    ],
)  # fmt: skip
def test_values_of_a_composed_tree_that_cannot_be_used(override, line):
    key, _, value = override.partition("=")
    *groups, name = key.split(".")
    tree = deepcopy(TREE)
    reduce(getitem, groups, tree)[name] = yaml.safe_load(value)
    with refused(line):
        config_from_tree(tree)


def test_a_sweep_goes_on_with_the_profile_that_it_began_with(tmp_path):
    config = load_config(["results_dir=here"])
    assert in_force(config, print) is config
    began = replace(config, profile=replace(config.profile, date="2020-01-01"))
    resolved = config.resolved | {"profile": to_dict(began.profile)}
    folder_of(config).create()
    write_sweep_json(folder_of(config), sweep_json_of(replace(began, resolved=resolved), {}))
    continued = in_force(load_config(["results_dir=here"]), print)
    assert (continued.profile, continued.resolved["profile"]["date"]) == (began.profile, "2020-01-01")
    other = load_config(["results_dir=here", "profile=megatron"])
    assert in_force(other, print) is other
