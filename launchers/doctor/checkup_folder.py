"""The folder in the results folder that the job on a node uses: it is made, tried, read and removed."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ultrabench.launchers.doctor.check import FAIL, WARN, Check, failed, first_problem
from ultrabench.launchers.doctor.node_checks import GIB, LITTLE_BYTES, Report
from ultrabench.record import to_dict
from ultrabench.store.claim import claim, owner
from ultrabench.store.folder import write_whole
from ultrabench.sweep.config import SweepConfig


class CheckupFolder:
    """RESULTS_DIR/.doctor-XXXXXXXX; no sweep has such a name, since those begin with no dot."""

    def __init__(self, config: SweepConfig) -> None:
        self.config, self.token = config, uuid.uuid4().hex
        self.results_dir = Path(config.results_dir).absolute()
        self.path = self.results_dir / f".doctor-{self.token[:8]}"
        self.keep = False
        """Whether the folder stays, because it shows what went wrong."""

    def report(self) -> Report | None:
        """What the checkup found on its node; None until its report is here."""
        # A listing is fresh where NFS remembers for a while that a file is not there.
        if "report.json" not in os.listdir(self.path):
            return None
        found: Report = json.loads((self.path / "report.json").read_text())
        return found | {"results_dir": self.results_dir, "same_folder": found.get("token") == self.token}

    def node_claim_seen(self) -> bool:
        """Whether the claim that the job made on its node can be seen here."""
        return owner(self.path / "claims", "node") is not None

    def try_it(self) -> Check:
        """Makes the folder; whether it can be written, and whether a claim there is made only once."""
        claims = self.path / "claims"
        request = {"token": self.token, "kernel": to_dict(self.config.kernel), "work_dir": os.getcwd()}
        try:
            claims.mkdir(parents=True)
            write_whole(self.path / "request.json", json.dumps(request))
            won = [claim(claims, "login", {"host": "here"}) for _ in range(2)]
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            remedy = "choose another with results_dir=FOLDER, which all nodes share"
            return failed(f"cannot write {self.results_dir}: {error.strerror}", remedy)
        return first_problem(
            f"{self.results_dir}: can be written, {free / GIB:.1f} GiB free",
            (won != [True, False], FAIL,
             "put results_dir= on a file system with hard links, such as NFS, Lustre or ext4",
             f"of two claims of one run {sum(won)} succeeded, so link(2) does not work"),
            (free < LITTLE_BYTES, WARN, "make room, or choose another with results_dir=FOLDER"),
        )  # fmt: skip


@contextlib.contextmanager
def checkup_folder(config: SweepConfig) -> Iterator[tuple[CheckupFolder, Check]]:
    """The folder and the check of it; the folder and the parents made for it are removed at the end."""
    folder = CheckupFolder(config)
    new = [f for f in (folder.results_dir, *folder.results_dir.parents) if not f.exists()]
    try:
        yield folder, folder.try_it()
    finally:
        if not folder.keep:
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                for made in new:
                    made.rmdir()
