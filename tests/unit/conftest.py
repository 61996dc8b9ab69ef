"""Settings of the unit tests, made before any of them imports torch or numpy, and a folder without configuration."""

import os

import pytest

# Idle threads wait by spinning, which costs more than they save with the small tensors of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty working folder, and no configuration but the package's, whatever this machine's user has."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "user"))
    return folder
