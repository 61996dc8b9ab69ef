"""What a rank loads from a checkpoint is what it has saved, bit for bit, and a file system that fails harms no run."""

import subprocess
from dataclasses import replace

import pytest

from tests.parity.server import checkpointed
from tests.parity.test_layouts import spec_of
from tests.parity.test_worker import events, phases, run_ranks, task_of

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    "case",
    [
        "dp=2 zero_stage=0 tied fp32", "dp=3 zero_stage=3 few bf16", "cp=2 pp=2 zero_stage=1 gas=2 interleaved bf16",
        "dp=2 tp=2 ep=2 zero_stage=3 moe uneven routing=learned bf16",
        *(pytest.param(case, marks=pytest.mark.campaign) for case in ("dp=4 zero_stage=2 dp_shard=2 bf16",
            "tp=2 cp=2 biased fp32")),
    ],
)  # fmt: skip
def test_what_is_loaded_was_saved_and_each_number_once(server, case):
    """A parameter and two moments in fp32, its number of steps, and the biases of routers; with tp each rank saves its
    own copies of norms, routers and heads, and no padding.
    """
    spec = spec_of(case)
    ranks = server.ask(checkpointed, spec)
    assert [differing for differing, _ in ranks] == [[]] * spec.layout.world_size
    num_routers = sum(spec.shape.layer(n).experts is not None for n in range(spec.shape.num_hidden_layers))
    for _, of_rank in ranks:
        shards = [name for name in of_rank if "@" in name and "." not in name.partition("@")[2]]
        assert {f"{name}.{key}" for name in shards for key in ("exp_avg", "exp_avg_sq", "step")} < {*of_rank}
        assert sum(name.endswith(".balance") for name in of_rank) == num_routers
    sizes = {name: size for _, of_rank in ranks for name, size in of_rank.items()}
    numbers = {name: size for name, size in sizes.items() if not name.endswith((".step", ".balance"))}
    copied = sum(size for name, size in numbers.items() if "@rank" in name)
    copies = spec.layout.world_size // spec.layout.pp // spec.layout.zero_shards
    assert (copied > 0) == (spec.layout.tp > 1)
    assert sum(numbers.values()) - copied * (1 - 1 / copies) == 12 * spec.shape.num_params


def test_parts_that_share_a_name_are_found_out(server):
    """One of two ranks then loads the part of the other."""
    assert "the loaded state differs" in server.ask(checkpointed, spec_of("dp=2 zero_stage=1 fp32"), True)


NUMBERS = {"save_s", "load_s", "bytes", "async_blocking_s", "async_s", "async_lost_steps"}


def test_a_run_saves_and_loads_after_all_else_is_reported(forks, tmp_path):
    task = replace(task_of("dp=2 zero_stage=1 gas=2", "bf16"), checkpoint=str(tmp_path / "checkpoint"))
    codes, lines = run_ranks(forks, task, tmp_path)
    assert codes == [0, 0]
    for rank_lines in lines:
        assert phases(rank_lines)[-3:] == ["measure", "checkpoint", "teardown"]
        names = [line["event"] for line in rank_lines if line["event"] != "step"]
        assert names[-5:] == ["memory", "done", "phase", "checkpoint", "phase"], (
            "no peak of the checkpoint counts"
        )
        measured = [line["measured"] for line in events(rank_lines, "step")]
        assert (measured.count(True), measured[-1]) == (8, False), "the last steps ran beside a save"
    (numbers,) = events(lines[0], "checkpoint")
    assert {*numbers} == NUMBERS | {"event", "time"}
    assert min(numbers[name] for name in NUMBERS - {"async_lost_steps"}) > 0
    assert numbers["async_blocking_s"] <= numbers["async_s"]
    assert numbers["bytes"] > 12 * task.spec.shape.num_params
    assert not (tmp_path / "checkpoint").exists()


def test_a_full_file_system_is_named_and_the_steps_stand(forks, tmp_path):
    """Torch itself would tell an error of its archive."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        task = replace(task_of("dp=2 zero_stage=1 gas=2"), checkpoint=str(disk / "checkpoint"))
        codes, lines = run_ranks(forks, task, tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert codes == [0, 0]
    for rank_lines in lines:
        (failure,) = events(rank_lines, "checkpoint")
        assert failure["message"] == "OSError: [Errno 28] No space left on device"
        assert [line["stopped"] for line in events(rank_lines, "done")] == ["max_steps"]
