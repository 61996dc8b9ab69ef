"""Mistakes with launcher=slurm, and the script that `sweep plan --show-script` prints."""

import pytest

from tests.unit.cli.conftest import one_line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["launcher=slrum"], "unknown launcher 'slrum'; did you mean slurm?"),
        (
            ["launcher=slurm", "cluster=mine"],
            "`ultrabench doctor --write` writes the configuration for cluster=mine",
        ),
        (
            ["launcher=slurm", "launcher.partion=hopper"],
            "'launcher.partion'; did you mean launcher.partition?",
        ),
        (["launcher.partition=hopper"], "launcher.partition is no setting of the launcher that is chosen"),
        (["launcher=slurm", "launcher.window=7-9"], "launcher.window='7-9'; write HH:MM-HH:MM"),
        (["launcher=slurm", "launcher.pack=0"], "launcher.pack=0; must be >= 1"),
        (["launcher=slurm", "launcher.python=3"], "launcher.python=3"),
        (["launcher=slurm", "launcher.sbatch.--foo=1"], "write an option's name without dashes in front"),
        (["launcher=slurm", "launcher.sbatch.foo=1"], "write +launcher.sbatch.NAME=VALUE"),
        (
            ["launcher=slurm", "+launcher.sbatch.array=0-3"],
            "launcher.sbatch.array; ultrabench sets that itself",
        ),
    ],
)
def test_overrides_that_cannot_be_used(ultrabench, tmp_path, overrides, line):
    assert line in one_line(ultrabench, "sweep", "launch", *overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--detach", "--max-gpu-hours", "9"], []], ids=" ".join)
def test_where_slurm_is_not_installed(ultrabench, tmp_path, monkeypatch, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = one_line(ultrabench, "sweep", "launch", "launcher=slurm", *words, code=3)
    assert line == (
        "Slurm cannot be asked: not on PATH: sbatch, squeue, scontrol, scancel; log in to a node of the cluster or "
        "`module load slurm`; or set launcher=local"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_slurm_cannot_write_to(ultrabench, tmp_path, monkeypatch):
    work = tmp_path / "back\\slash"
    work.mkdir()
    monkeypatch.chdir(work)
    assert "has a backslash or a line break" in one_line(ultrabench, "sweep", "launch", "launcher=slurm")
    assert list(work.iterdir()) == []


def test_a_local_sweep_has_no_script(ultrabench, tmp_path):
    line = one_line(ultrabench, "sweep", "plan", "--show-script")
    assert line == "launcher=local submits no script; add launcher=slurm"
    assert "can run" in one_line(ultrabench, "sweep", "plan", "--show-script", "launcher=slurm", "model=1B",
                                 "sweep.cp=[2]", "sweep.tp=[1]", "sweep.seq_len=4098")  # fmt: skip


def test_the_script_is_printed_and_nothing_else_is_done(ultrabench, tmp_path, monkeypatch):
    config = tmp_path / "ultrabench/cluster"
    config.mkdir(parents=True)
    (config / "mine.yaml").write_text("partition: hopper\naccount: 1234\nsetup: ['module load cuda/12.8']\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = (
        "launcher=slurm",
        "cluster=mine",
        "model=tiny",
        "name=my sweep",
        'launcher.python=[env,"A=b c",python]',
    )
    code, out, err = ultrabench("sweep", "plan", "--show-script", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --partition=hopper", "#SBATCH --account=1234", "module load cuda/12.8"} <= set(lines)
    command = lines[lines.index("# command") + 2]
    assert command.startswith("srun ")
    assert f" env 'A=b c' python -P -m ultrabench.agent '{tmp_path}/results/my sweep/allocations/n" in command
    assert [p.name for p in tmp_path.iterdir()] == ["ultrabench"]
