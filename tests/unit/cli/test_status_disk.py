"""`sweep status` names a results disk on which nothing can be written, and a launch leaves no empty folders there."""

from tests.disks import on_a_small_disk
from ultrabench.cli.sweep.status import disk_problem


def test_a_disk_that_is_full_or_read_only_is_named(tmp_path):
    printed = on_a_small_disk(
        tmp_path,
        """
        from ultrabench.cli.sweep.status import disk_problem
        print(disk_problem(disk))
        fill()
        print(disk_problem(disk))
        free()
        print(disk_problem(disk))
        read_only(True)
        print(disk_problem(disk))
        """,
    )
    disk = tmp_path / "disk"
    assert printed.splitlines() == [
        "None", f"cannot write to {disk} (No space left on device)", "None", f"{disk} is on a read-only file system",
    ]  # fmt: skip


def test_the_probe_of_a_disk_leaves_nothing(tmp_path):
    assert disk_problem(tmp_path) is None
    assert [*tmp_path.iterdir()] == []


def test_a_launch_makes_no_empty_folders_of_allocations_while_the_disk_is_full(tmp_path):
    printed = on_a_small_disk(
        tmp_path,
        """
        from tests.unit.launchers import played
        sweep = played.open_played(disk / "quick")
        reconciler = played.reconciler_of(sweep, played.Played(max_jobs=1))
        fill()
        for _ in range(3):
            try:
                reconciler.run_once()
            except OSError as error:
                print(error.strerror)
        print([*sweep.folder.allocations.iterdir()])
        free()
        reconciler.run_once()
        print(len([*sweep.folder.allocations.iterdir()]))
        """,
    )
    assert printed.splitlines() == ["No space left on device"] * 3 + ["[]", "1"]
