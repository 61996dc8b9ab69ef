"""Folders, files and pipes that are unusual: commands work, or say in one line what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.configs import write_config
from tests.unit.cli.conftest import one_line


@pytest.mark.parametrize("words", ["heatmap", "report", "sweep top"])
def test_a_folder_whose_name_is_not_utf_8_is_read(sweep, words):
    odd = os.fsdecode(b"r\xff\xe9s")
    sweep.path.parent.rename(odd)
    command = [sys.executable, "-m", "ultrabench.cli.main", *words.split(), f"{odd}/quick-cpu"]
    process = patience.run(command, 120)
    assert (process.returncode, "Traceback" in process.stderr) == (0, False), process.stderr


def test_an_empty_sweep_json_has_a_remedy_that_works(ultrabench, sweep):
    content = sweep.sweep_json.read_text()
    sweep.sweep_json.write_text("")
    line = one_line(ultrabench, "sweep", "status")
    assert "is empty, perhaps after a crash of the file system; delete it and run" in line
    sweep.sweep_json.unlink()
    sweep.sweep_json.write_text(content)  # as the next launch writes it
    assert ultrabench("sweep", "status")[0] == 0


def test_a_yaml_file_of_billions_of_aliases_is_refused_at_once(ultrabench):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    write_config("model/bomb", "\n".join(lines))
    assert "its aliases expand to 4,412,961,516 values" in one_line(ultrabench, "sweep", "plan", "model=bomb")
    Path("ultrabench/model/bytes.yaml").write_bytes(b"\xff\xfe")
    assert ultrabench("sweep", "plan")[0] == 0, "files that nobody names are not read"


def test_output_that_nobody_reads_is_no_failure():
    command = [sys.executable, "-m", "ultrabench.cli.main", "configs", "model"]
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")
        process.stderr.close()
