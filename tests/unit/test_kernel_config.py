import os
import subprocess
import sys
from pathlib import Path

import pytest

import ultrabench
from ultrabench.kernel_config import KernelConfig, rank_sources

ROOT = Path(ultrabench.__file__).parent


@pytest.mark.parametrize("form", ["{}", "--config={}", "train.config={}"])
def test_a_file_that_is_edited_gives_another_digest(tmp_path, form):
    file = tmp_path / "conf.yaml"
    file.write_text("lr: 1")
    kernel = KernelConfig(name="mine", kind="command", command=("python", "train", form.format(file)))
    before = kernel.digest()
    assert kernel.digest() == before
    file.write_text("lr: 2")
    assert kernel.digest() != before


def test_every_file_that_a_rank_imports_counts():
    code = (
        "import sys, importlib, pathlib\n"
        "import ultrabench\n"
        "root = pathlib.Path(ultrabench.__file__).parent\n"
        "for path in sorted((root / 'kernel').rglob('*.py')):\n"
        "    parts = path.relative_to(root).with_suffix('').parts\n"
        "    importlib.import_module('.'.join(('ultrabench', *parts)).removesuffix('.__init__'))\n"
        "print(*(m.__file__ for n, m in list(sys.modules.items()) if n.startswith('ultrabench.')))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    imported = {Path(name).resolve() for name in told.stdout.split() if not name.endswith("__init__.py")}
    counted = {path.resolve() for path in rank_sources(ROOT)}
    assert imported <= counted
    assert len(imported) > 25


def test_each_source_changes_the_digest(tmp_path, monkeypatch):
    for path in rank_sources(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(ultrabench, "__file__", str(tmp_path / "__init__.py"))
    kernel, seen = KernelConfig(name="embedded"), set()
    for path in rank_sources(tmp_path):
        seen.add(kernel.digest())
        path.write_text(path.read_text() + "# changed\n")
    seen.add(kernel.digest())
    assert len(seen) == len(rank_sources(tmp_path)) + 1
