"""Which training program a run uses, and with which options."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench.errors import ConfigError

KERNEL_VERSION = 2
"""Bumped by hand when the embedded kernel's numbers may change; part of run_id."""

RECOMPUTE = ("none", "selective", "full")

KINDS = ("embedded", "command", "probe")

STEP_TIMES = ("seconds", "milliseconds", "tokens_per_s_per_gpu")
"""How a line of a log may tell how long a step took."""

_IMPORT = re.compile(r"^\s*(?:from|import)\s+ultrabench\.([\w.]+)(?:\s+import\s+(\w+))?", re.MULTILINE)
"""An import of a module of this package: its path, and the first name that is taken from it."""

CODE_SUFFIXES = frozenset({".py", ".sh", ".yaml", ".yml", ".toml", ".json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """The embedded kernel, or a command of the user's own."""

    name: str
    """Part of a cell: results of two kernels are never ranked against each other."""
    kind: str = "embedded"
    """embedded: ours, forked from a warm server; command: the user's program, started by exec;
    probe: no training, the rates of devices and links instead, forked as well."""
    version: int = KERNEL_VERSION
    precision: str = "fp32"
    """Arithmetic of forward and backward: fp32, bf16 (fp32 master weights) or fp64."""
    compile: bool = False
    """torch.compile of each decoder block."""
    attention: str = "sdpa"
    recompute: str = "none"
    """What backward computes anew instead of keeping: none, selective (all but matrix products
    and attention) or full (every decoder layer)."""
    command: tuple[str, ...] = ()
    """Program and arguments; `{tp}` and the other words of a layout are filled in."""
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment of the command; declared here, so part of env_id. Secrets are redacted, so that
    results stay comparable when one is renewed."""
    supports: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Word of a layout or a model -> the values the command can do; one left out can be anything."""
    step_line: str | None = None
    """For programs that only log: a regular expression with one of the groups of STEP_TIMES and,
    optionally, `loss`, matched against each line of one rank."""
    step_rank: int = 0
    """The rank whose log is read; -1 is the last one."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kernel.kind={self.kind!r}; must be one of {', '.join(KINDS)}")
        if self.precision not in ("fp32", "bf16", "fp64"):
            raise ConfigError(f"kernel.precision={self.precision!r}; must be fp32, bf16 or fp64")
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"kernel.recompute={self.recompute!r}; must be one of {', '.join(RECOMPUTE)}")
        if self.step_line is not None:
            _require_pattern(self.step_line)
        if self.kind == "command" and not self.command:
            raise ConfigError(
                "kernel.command is empty; give the program, such as kernel.command='[python,train.py]'"
            )

    def digest(self) -> str:
        """First 16 hex digits of a hash of the code that runs.

        The sources that a rank of ours imports, or the command's words and the content of every program
        and configuration file among them (by their suffix: a log or a data file may change).
        """
        seen = hashlib.sha256()
        if self.kind != "command":
            root = Path(ultrabench.__file__).parent
            for path in rank_sources(root):
                seen.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
        for word in self.command:
            seen.update(word.encode() + b"\0")
            for name in (word, word.partition("=")[2]):  # a file may be the value of an option
                if Path(name).suffix in CODE_SUFFIXES and Path(name).is_file():
                    seen.update(Path(name).read_bytes())
        return seen.hexdigest()[:16]


def rank_sources(root: Path) -> list[Path]:
    """The files of the package at `root` that a rank imports: those of the kernel, and what these import in turn."""
    left, found = [*(root / "kernel").rglob("*.py")], set[Path]()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            for module, name in _IMPORT.findall(path.read_text()):
                place = root.joinpath(*module.split("."))
                left += [p for p in (place.with_suffix(".py"), place / f"{name}.py") if p.is_file()]
    return sorted(found)


def _require_pattern(text: str) -> None:
    try:
        groups = re.compile(text).groupindex
    except re.error as error:
        raise ConfigError(f"kernel.step_line={text!r} is no regular expression: {error}") from None
    if not set(STEP_TIMES) & set(groups):
        wanted = ", ".join(f"(?P<{name}>...)" for name in STEP_TIMES)
        raise ConfigError(f"kernel.step_line={text!r} lacks a group, one of {wanted}")
