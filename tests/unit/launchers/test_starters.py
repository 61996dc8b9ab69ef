"""Commands that start ranks themselves: which are refused, which are warned about, and which run."""

import shlex
from dataclasses import replace

import pytest

from tests.configs import refused
from ultrabench.launchers.required_programs import require_program
from ultrabench.launchers.starters import starter_in_script, starter_of, starter_warnings
from ultrabench.sweep.config.load import load_config

CONFIG = load_config(["kernel=command", "kernel.command=[env,train]", "model=tiny", "sweep.nodes=[1]"])


def config_of(command: str, nodes: int = 1, **options: str):
    """The configuration of a sweep with this command."""
    kernel = replace(CONFIG.kernel, command=tuple(shlex.split(command)), **options)
    return replace(CONFIG, kernel=kernel, axes=replace(CONFIG.axes, nodes=(nodes,)))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc_per_node=2 x.py", "torchrun"), ("/env/bin/torchrun x.py", "torchrun"),
        ("python -m torch.distributed.run x.py", "torchrun"),
        ("python3.12 -u -m torch.distributed.launch x.py", "torchrun"),
        ("python /env/bin/torchrun x.py", "torchrun"), ("env OMP_NUM_THREADS=4 torchrun x.py", "torchrun"),
        ("timeout 60 nsys profile -o x torchrun x.py", "torchrun"),
        ("conda run -n lab accelerate launch x.py", "accelerate"),
        ("deepspeed x.py", "deepspeed"), ("srun torchrun x.py", "srun"), ("mpirun -np 8 python x.py", "mpirun"),
        ("python -mtorch.distributed.run x.py", "torchrun"), ("python -um torch.distributed.run x.py", "torchrun"),
        ("python -X importtime -W ignore -m torch.distributed.run x.py", "torchrun"),
        ("numactl -m 0 torchrun x.py", "torchrun"),
        ("accelerate --debug launch x.py", "accelerate"), ("python -X dev x.py -m torch.distributed.run", None),
        ("accelerate config", None), ("python x.py --launcher torchrun", None), ("./train --launcher deepspeed", None),
        ("uv run --with deepspeed train.py", None), ("python -m train deepspeed", None), ("torchrunner x.py", None),
        ("bash -c 'torchrun x.py'", None),
    ],
)  # fmt: skip
def test_a_starter_is_known_by_its_name_behind_whatever_runs_it(command, name):
    starter = starter_of(shlex.split(command))
    assert (starter.name if starter else None) == name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("bash -c 'cd x && exec torchrun x.py \"$@\"' torchrun", "torchrun"),
        ("env A=1 bash -euc 'A=1 /env/bin/torchrun x.py'", "torchrun"),
        ("sh -c 'exec python -m torch.distributed.run x.py'", "torchrun"), ("bash run.sh", "accelerate"),
        ("bash -lc 'cd x; accelerate --debug launch x.py'", "accelerate"),
        ("bash -eo pipefail -c 'python -mdeepspeed x'", "deepspeed"),
        ("bash -c 'accelerate config; launch x.py'", None), ("./run.sh", "accelerate"),
        ("bash -c '# torchrun x.py\nexec python x.py'", None), ("bash -c 'python deepspeed/x.py'", None),
        ("bash none.sh", None),
        ("python x.py", None),
    ],
)  # fmt: skip
def test_a_starter_in_a_shell_script_is_found(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("set -e\naccelerate  launch \\\n  x.py\n")
    starter = starter_in_script(shlex.split(command))
    assert (starter.name if starter else None) == name


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("torchrun --nproc_per_node=2 x.py", {},
         "kernel.command is torchrun; it starts all ranks of a node, while kernel.launch_per=rank starts it once "
         "for each rank; "
         "set kernel.launch_per=node"),
        ("mpirun -np 8 python x.py", {"launch_per": "node"},
         "kernel.command is mpirun; it starts the processes of a whole job, while ultrabench starts the command "
         "on each node "
         "of its own jobs; give the command without mpirun, or torchrun with kernel.launch_per=node"),
        ("deepspeed --hostfile=hosts x.py", {"launch_per": "node"},
         "kernel.command is deepspeed; without --no_ssh it starts the ranks of a whole job by ssh, "
         "while ultrabench starts it "
         "on each node; add --no_ssh, --node_rank={node_rank}, --master_addr={master_addr} and "
         "--master_port={master_port}"),
        ("deepspeed x.py", {"launch_per": "node", "nodes": 2}, "kernel.command is deepspeed; without --no_ssh"),
    ],
)  # fmt: skip
def test_a_command_that_would_start_its_ranks_too_often_is_refused(command, options, message):
    with refused(message):
        require_program(config_of(command, **options))


def test_what_starts_each_rank_once_may_run_and_a_script_is_warned_about():
    guarded = "bash -c '[ \"$LOCAL_RANK\" = 0 ] || exit 0; exec torchrun x.py'"
    for command, options in [
        ("env torchrun x", {"launch_per": "node"}), ("env deepspeed --no_ssh x", {"launch_per": "node", "nodes": 2}),
        ("env deepspeed x", {"launch_per": "node"}), (guarded, {}), (guarded, {"launch_per": "node"}),
    ]:  # fmt: skip
        require_program(config_of(command, **options))
    (line,) = starter_warnings(config_of(guarded))
    assert line.endswith(
        "set kernel.launch_per=node, unless the script runs it on one rank of each node only"
    )
    (line,) = starter_warnings(config_of("bash -c 'srun x'", launch_per="node"))
    assert line.endswith(
        "runs srun, which starts the processes of a whole job; ultrabench runs the script on each node: leave it out"
    )
    assert not [*starter_warnings(config_of(guarded, launch_per="node"))]
