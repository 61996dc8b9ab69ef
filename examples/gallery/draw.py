"""Runs the commands of examples/gallery/README.md and takes screenshots of its page: `make gallery`."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples/gallery/README.md"
WIDTHS = {1400: 1000, 400: 800}
"""Width of a screenshot -> its height, in pixels."""


def commands():
    """The words of each command of the page, without `ultrabench`."""
    lines = re.findall(r"^ultrabench (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(words) for words in lines]


def main():
    (ROOT / "docs/gallery").mkdir(exist_ok=True)
    for words in commands():
        subprocess.run([sys.executable, "-m", "ultrabench", *words], check=True, cwd=ROOT)
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: the screenshots of the page stay as they are")
        return
    report = ROOT / "docs/gallery/report.html"
    for width, height in WIDTHS.items():
        picture = report.with_name(f"report-{width}.png")
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=4000",
            f"--screenshot={picture}",
        ]
        subprocess.run(
            [chromium, *options, f"--window-size={width},{height}", report.as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
