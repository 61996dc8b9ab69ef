"""The built wheel holds every module and every configuration, and works by itself."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("sweep", "launchers", "agent", "kernel", "analysis", "configs")

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The content of a wheel built from the files that git tracks, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    copy = f"git ls-files -z | tar --null --ignore-failed-read -cf - -T - | tar -xf - -C '{source}'"
    subprocess.run(copy, shell=True, cwd=ROOT, capture_output=True, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    process = subprocess.run([*build, "-w", str(folder), str(source)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_every_module_and_configuration_is_in_the_wheel(unpacked):
    expected = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/ultrabench").rglob("*.py")}
    kinds = (".py", ".yaml", ".html", ".css", ".js")
    tracked = (path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in kinds)
    expected |= {f"ultrabench/{path.relative_to(ROOT)}" for path in tracked}
    unzipped = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    assert expected <= unzipped
    strangers = {f for f in unzipped if f.endswith((".py", ".yaml"))} - expected
    assert strangers == set(), "the wheel holds what is not in the tree"


def test_the_wheel_plans_a_sweep_beside_files_named_like_its_rooms(unpacked, tmp_path):
    for name in (*ROOMS, "random", "ultrabench_main"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    code = (
        f"import sys, ultrabench; assert ultrabench.__file__.startswith({str(unpacked)!r}), ultrabench.__file__; "
        "sys.argv = ['ultrabench', 'sweep', 'plan', '--json']; from ultrabench.cli.main import main; main()"
    )
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-P", "-c", code]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    assert '"sweep": "quick-cpu"' in process.stdout
