"""Gives each simulated node a small /tmp of its own, and a file system on which removing files can be slow."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

SIZE = "64m"
"""Size of the file system for TMPDIR of a node, which is small so that a fault can fill it."""
SLOW_UNLINK = Path(__file__).parent / "slow_unlink.c"
PROLOG = """#!/bin/bash
echo "export TMPDIR={folder}/$SLURMD_NODENAME"
[ -e {library} ] && echo "export LD_PRELOAD={library}"
[ -e {folder}/$SLURMD_NODENAME.no_agent ] && echo "export PYTHONHOME=/nowhere"
exit 0
"""
"""What srun runs on a node before the agent; it adds the printed variables to the environment of the agent."""


class Nodes:
    """What the nodes have besides Slurm: the folder NODE in `folder` is the TMPDIR of NODE."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder, self.prolog, self.slow_unlink = folder, folder / "prolog", folder / "slow"
        library = folder / "slow_unlink.so"
        folder.mkdir()
        mounted = [_mount(folder / name) for name in sorted(names)]
        self.mounted = all(mounted)
        """Whether each TMPDIR is a file system of its own."""
        self.unlinks_slowly = shutil.which("gcc") is not None
        """Whether removing a file takes longer while the file `slow_unlink` exists; it needs a C compiler."""
        if self.unlinks_slowly:
            switch = f'-DSWITCH="{self.slow_unlink}"'
            words = ["gcc", "-shared", "-fPIC", "-O1", switch, "-o", str(library), str(SLOW_UNLINK), "-ldl"]
            subprocess.run(words, check=True, capture_output=True)
        self.prolog.write_text(PROLOG.format(folder=folder, library=library))
        self.prolog.chmod(0o755)

    def close(self) -> None:
        """Removes the file systems."""
        for mount in self.folder.iterdir():
            if mount.is_mount():
                subprocess.run(["umount", "--lazy", str(mount)], capture_output=True)


def _mount(folder: Path) -> bool:
    """Makes a folder, with a small file system of its own if this machine allows that."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0
