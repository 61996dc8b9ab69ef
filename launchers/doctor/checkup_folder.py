"""The folder in the results folder that the job on a node uses: it is made, tried, read and removed."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrabench.launchers.doctor.check import Check, failed, passed, warned
from ultrabench.record import to_dict
from ultrabench.store.claim import claim, owner
from ultrabench.store.folder import write_whole
from ultrabench.sweep.config import SweepConfig

LITTLE_BYTES = 2**30
GIB = 2**30


class CheckupFolder:
    """RESULTS_DIR/.doctor-XXXXXXXX; no sweep has such a name, since those begin with no dot."""

    def __init__(self, results_dir: Path) -> None:
        self.results_dir = results_dir
        self.token = uuid.uuid4().hex
        self.path = results_dir / f".doctor-{self.token[:8]}"
        self.keep = False
        """Whether the folder stays, because it shows what went wrong."""

    @property
    def claims(self) -> Path:
        """Folder in which claims are tried."""
        return self.path / "claims"

    def make(self, config: SweepConfig) -> None:
        """Makes the folder and writes what the job on the node has to find.

        Raises:
            OSError: it cannot be written.
        """
        self.claims.mkdir(parents=True)
        request = {"token": self.token, "kernel": to_dict(config.kernel), "work_dir": os.getcwd()}
        write_whole(self.path / "request.json", json.dumps(request))

    def report(self) -> dict[str, Any] | None:
        """What the job found on its node; None until its report is here."""
        # A listing is fresh where NFS remembers for a while that a file is not there.
        if "report.json" not in os.listdir(self.path):
            return None
        found: dict[str, Any] = json.loads((self.path / "report.json").read_text())
        return found

    def node_claim_seen(self) -> bool:
        """Whether the claim that the job made on its node can be seen here."""
        return owner(self.claims, "node") is not None


@contextlib.contextmanager
def checkup_folder(config: SweepConfig) -> Iterator[tuple[CheckupFolder, Check]]:
    """The folder and the check of it; the folder and the parents made for it are removed at the end."""
    results_dir = Path(config.results_dir).absolute()
    new = [folder for folder in (results_dir, *results_dir.parents) if not folder.exists()]
    folder = CheckupFolder(results_dir)
    try:
        yield folder, _try(folder, config)
    finally:
        if not folder.keep:
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                for made in new:
                    made.rmdir()


def _try(folder: CheckupFolder, config: SweepConfig) -> Check:
    """Whether the results folder can be written, and whether a claim there is made only once."""
    name = "results folder"
    try:
        folder.make(config)
        claims = [claim(folder.claims, "login", {"host": "here"}) for _ in range(2)]
        free = shutil.disk_usage(folder.path).free
    except OSError as error:
        told = f"cannot write {folder.results_dir}: {error.strerror}"
        return failed(name, told, "choose another with results_dir=FOLDER, which all nodes share")
    told = f"{folder.results_dir}: can be written, {free / GIB:.1f} GiB free"
    if claims != [True, False]:
        told = f"{folder.results_dir}: of two claims of one run {sum(claims)} succeeded, so link(2) does not work"
        remedy = "put results_dir= on a file system with hard links, such as NFS, Lustre or ext4"
        return failed(name, told, remedy)
    if free < LITTLE_BYTES:
        return warned(name, told, "make room, or choose another with results_dir=FOLDER")
    return passed(name, f"{told}, claims work")
