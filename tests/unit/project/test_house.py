import os
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "ultrabench"
ROOMS = ("agent", "analysis", "configs", "kernel", "launchers", "sweep")
SOURCES = sorted(
    [*PACKAGE.glob("**/*.py")] + [path for room in ROOMS for path in (ROOT / room).glob("**/*.py")]
)
OF_PAGES = ("docs", "results", "benchmarks", "tests", "examples")
OUR_FOLDERS = (*ROOMS, "src", "docs", "tests", "examples", "benchmarks", ".ci")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in OF_PAGES for page in (ROOT / folder).glob("**/*.md"))]
)
MACHINE_PATH = re.compile(r"(?<![\w./$~}])/(?:work|root|Users|home/\w+|workspace)/")


def test_every_room_is_the_folder_at_the_top():
    links = {path.name: str(path.readlink()) for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_default_that_a_page_tells_with_its_unit_is_that_of_the_configuration(page):
    choices = {"measure": "measure/default", "launcher": "launcher/slurm", "retry": "retry/default"}
    defaults = re.findall(
        r"`(measure|launcher|retry)\.(\w+)`\s+\(([\d.]+) (?:s|MiB)\)", page.read_text(encoding="utf-8")
    )
    for group, key, number in defaults:
        text = (ROOT / f"configs/{choices[group]}.yaml").read_text(encoding="utf-8")
        assert float(yaml.safe_load(text)[key]) == float(number), f"{group}.{key}"


def anchors(page):
    heads = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{target} does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{target} has no such heading"


def test_no_file_names_a_path_of_somebodys_machine():
    names = {".py", ".yaml", ".yml", ".toml", ".md", ".sh", ".txt", ".cfg", ""}
    inside = [path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*")]
    ours = {p for p in (*ROOT.iterdir(), *inside) if p.is_file() and p.suffix in names}
    places = []
    for path in sorted(p for p in ours if "__pycache__" not in p.parts):
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                places.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()[:80]}")
    assert places == []


def test_lines_of_the_page_have_at_most_120_columns_as_those_of_python_have():
    with (ROOT / "pyproject.toml").open("rb") as file:
        max_columns = tomllib.load(file)["tool"]["ruff"]["lint"]["pycodestyle"]["max-line-length"]
    paths = [path for path in (ROOT / "analysis").rglob("*") if path.suffix in (".js", ".css", ".html")]
    too_long = [
        f"{path.relative_to(ROOT)}:{n}"
        for path in sorted(paths)
        for n, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > max_columns
    ]
    assert paths
    assert too_long == []


def test_sources_are_ascii():
    odd = [str(p.relative_to(ROOT)) for p in SOURCES if not p.read_bytes().isascii()]
    assert odd == []


def test_every_file_of_tests_belongs_to_one_part_of_make_test():
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    shown = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    patterns = re.findall(r"^PART=.* -m pytest .* (tests/\S+) >", shown.stdout, re.MULTILINE)
    places = [place for pattern in patterns for place in ROOT.glob(pattern)]
    files = Counter(
        file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))
    )
    assert files == Counter((ROOT / "tests").rglob("test_*.py"))
