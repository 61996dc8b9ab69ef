"""The lines of a log: their prefixes, times and kinds, whatever program or launcher wrote them."""

import re
from datetime import datetime
from enum import Enum

from ultrabench.batch_system import LOG_WRITERS

MAX_LINE_CHARS = 300
"""Longest line, in characters, that is quoted."""
MAX_PREFIXES = 256
"""Largest number of prefixes that one log may teach, such as the names of its hosts."""
DUMP_FRAMES = 3
"""Number of lines that are kept of each dump of stacks."""
CHAIN_TEXTS = ("The above exception was the direct cause", "During handling of the above exception")
"""What Python writes between an exception and the one that it led to."""
TRACEBACK_TEXT = "(most recent call last)"
"""What every traceback has in its first line, be it of Python, rich, IPython or TorchScript."""


class LineKind(Enum):
    """What a line says about the program, apart from failures."""

    BLANK = 0
    STACK = 1
    """A frame, a source line, or anything else that is indented."""
    NOISE = 2
    """What launchers and libraries write when a program ends, and separators."""
    NOTE = 3
    """A warning, or an error that a logger wrote; the program may have gone on."""
    PROGRESS = 4
    """Anything else: the program did something."""


_ANSI_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LINE_END = re.compile(r"\r\n|[\n\r]")  # a progress bar overwrites its line
_PREFIX = re.compile(
    r"\[[A-Za-z_]*\d+\]: ?"  # torch ([rank3]:), torchrun --tee ([default3]:)
    r"|\[\d+,\d+\]<std(?:err|out)>: ?"  # mpirun --tag-output
    r"|\d{1,5}: (?=\S|  )"  # srun --label
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d) "  # Kubernetes, docker logs --timestamps
    r"|\([\w.:-]+ pid=\d+(?:, ip=[\d.:a-f]+)?\) ?"  # Ray
)
_HOST_PREFIX = re.compile(r"\S{1,80}(?:: ?|\s+\| )$|\[[^\]]{1,80}\]:? ?$")  # pdsh, docker compose
_LOGGER_HEAD = re.compile(
    r"^\[?[EFIWDCV]\d{4}[ \d]"  # glog and torch's own loggers
    r"|^\[[EFIW]\d* "
    r"|^.{0,60}?[\[ :|(<-](?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[\] :|)>-]"
    r"|^(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[:\] |]"
)
_WARNING = re.compile(r"\bwarn(?:ing)?s?\b|^\[?W\d{4}[ \d]|^\[W\d* ", re.IGNORECASE)
_LOGGED_ERROR = re.compile(
    r"^\[?[EF]\d{4}[ \d]|^\[[EF]\d* |(?:^|[\[ :|(<-])(?:ERROR|CRITICAL|FATAL)(?:[\] :|)>-]|$)"
)
_GOES_ON = re.compile(
    r"\bretry(?:ing)?\b|\bskipp|\bcontinu(?:e|ing)\b|\bfall(?:ing)? back|\bresum", re.IGNORECASE
)
_STACK = re.compile(
    r"\s|frame #\d+|#\d+ |Traceback |Exception raised from |(?:Current t|T)hread 0x|Extension modules: "
    r"|C\+\+ CapturedTraceback|<no Python frame>|[\u2502\u256d\u2570\u2503\u250f\u2517]|\| "
    r"|\+-+|\[\S+:\d+(?::\d+)*\] +\[ ?\d+\]|/\S+\([^)]*\+0x|\^+$"
)
_NOISE = re.compile(
    r"[=*#~_-]{5,}|.*(?:Killing subprocess|exits with return code|closing signal SIG|failed \(exitcode: )"
    rf"|(?:{LOG_WRITERS}): "
    r"|mpirun|prterun|wandb: |Failures:|Root Cause \(first|\[\d+\]:$|\S+ FAILED$"
    r"|Set the environment variable HYDRA|Error executing job with overrides|For debugging consider|Compile with `TORCH"
    r"|(?:CUDA|HIP) kernel errors might|Search for `cuda|Device-side assertion tracking|Set "
    r"TORCHDYNAMO|You can suppress this"
    r"|.*(?:resource_tracker: |NCCL INFO|\(core dumped\)|destroy_process_group\(\)|memory fragmentation)"
)
_DUMP = re.compile(
    r"\s*File \".*\", line \d+ in |(?:Current t|T)hread 0x|Extension modules: |frame #\d+|\s+\.\.\.$|#\d+ "
    r"|  <no Python frame>|/\S+\([^)]*\+0x"
)
_GLOG_TIME = re.compile(r"\[?[EFIW](\d\d)(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d+)?)")
_ISO_TIME = re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
_TIME_CHARS = 90
"""The first characters of a line, in which its time is looked for."""


def quoted(text: str) -> str:
    """A text as one line of at most MAX_LINE_CHARS characters."""
    return " ".join(text.split())[:MAX_LINE_CHARS]


def split_lines(text: str) -> list[str]:
    """The lines of a text without the codes of terminals; what a progress bar overwrites is a line of its own."""
    return _LINE_END.split(_ANSI_CODE.sub("", text) if "\x1b" in text else text)


def line_kind(text: str) -> LineKind:
    """The kind of a line without its prefix."""
    if not text.strip():
        return LineKind.BLANK
    if _STACK.match(text):
        return LineKind.STACK
    if _NOISE.match(text):
        return LineKind.NOISE
    return LineKind.NOTE if is_note(text) and not _GOES_ON.search(text) else LineKind.PROGRESS


def is_note(text: str) -> bool:
    """Whether a line is a warning, or an error that a logger wrote."""
    return bool(_WARNING.search(text) or _LOGGED_ERROR.search(text[:_TIME_CHARS]) or "NCCL WARN" in text)


def is_warning(text: str) -> bool:
    """Whether a line is a warning."""
    return bool(_WARNING.search(text))


def is_logged(text: str) -> bool:
    """Whether a logger wrote a line, as its level or its time at the beginning shows."""
    return bool(_LOGGER_HEAD.match(text))


def time_of(text: str) -> float | None:
    """The time at the beginning of a line, in seconds since the year began; None if it has none.

    The year does not count, since glog writes none.
    """
    match = _GLOG_TIME.search(text[:_TIME_CHARS]) or _ISO_TIME.search(text[:_TIME_CHARS])
    if match is None:
        return None
    month, day, hour, minute = map(int, match.groups()[:4])
    try:
        days = (datetime(2000, month, day) - datetime(2000, 1, 1)).days
    except ValueError:
        return None
    return 60.0 * (60 * (24 * days + hour) + minute) + float(match[5].replace(",", "."))


class Prefixes:
    """Splits lines into the prefix that a launcher put before them, and the text of the program.

    A host's name looks like other words, so it counts as a prefix only once a traceback began behind it.
    """

    def __init__(self) -> None:
        self._learned = dict[str, None]()

    def split(self, line: str) -> tuple[str, str]:
        """The prefix of a line, empty if it has none, and the rest of the line."""
        start = 0
        while (match := _PREFIX.match(line, start)) and match.end() > start:
            start = match.end()
        for prefix in self._learned:
            if line.startswith(prefix, start):
                start += len(prefix)
                break
        else:
            if line.endswith(f"{TRACEBACK_TEXT}:"):
                start += self._learn(line[start:])
        return line[:start], line[start:]

    def _learn(self, text: str) -> int:
        """Takes what is before a traceback as a prefix; returns its length."""
        prefix = text.removesuffix(f"Traceback {TRACEBACK_TEXT}:")
        # Anything else before a traceback is a line that was not ended, such as a progress bar.
        if prefix == text or not _HOST_PREFIX.match(prefix) or is_logged(prefix):
            return 0
        if len(self._learned) < MAX_PREFIXES:
            self._learned[prefix] = None
        return len(prefix)


def without_dumps(lines: list[str]) -> list[str]:
    """The lines without all but the first DUMP_FRAMES of each dump of stacks (faulthandler, frames of C++)."""
    kept_lines, num_dumped = list[str](), 0
    for line in lines:
        is_dump = bool(_DUMP.match(line)) or (num_dumped > 0 and not line.strip())
        num_dumped = num_dumped + 1 if is_dump else 0
        if num_dumped <= DUMP_FRAMES:
            kept_lines.append(line)
    return kept_lines
