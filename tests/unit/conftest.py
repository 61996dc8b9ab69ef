"""A folder without configuration."""

import pytest


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty working folder, and no configuration but the package's, whatever this machine's user has."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "user"))
    return folder
