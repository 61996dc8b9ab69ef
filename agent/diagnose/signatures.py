"""The causes of failures: the status of each, and the text by which a log shows it.

Texts are those of torch, NCCL (github.com/NVIDIA/nccl, src/debug.cc and src/init.cc), gloo, glibc, CPython
and the CUDA runtime (docs.nvidia.com/cuda/cuda-runtime-api, cudaGetErrorString); Xids as in
docs.nvidia.com/deploy/xid-errors.
"""

import re
from dataclasses import dataclass
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR2

from ultrabench.result import CIRCUMSTANTIAL_CAUSES, Status


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of failures."""

    name: str
    status: Status
    description: str
    """The cause in a few words, with which the reason of a result begins."""
    pattern: str = ""
    """Regular expression of a line that shows the cause; empty if only other evidence shows it."""
    signals: tuple[int, ...] = ()
    """Signals that show the cause when ultrabench did not send them."""

    @property
    def tier(self) -> int:
        """Smaller for causes that come first: hardware, then memory, invalid numbers, and communication last."""
        tier_by_name = {"foreign_memory": 1, "exit_code": 4, "exited_early": 5}
        tier_by_status = {Status.NODE_FAIL: 0, Status.OOM: 1, Status.INVALID: 2, Status.COMM_ERROR: 6}
        return tier_by_name.get(self.name, tier_by_status.get(self.status, 3))

    @property
    def proves_fault(self) -> bool:
        """Whether its text proves a fault of the node, whatever other ranks and other nodes do."""
        return self.status == Status.NODE_FAIL and self.name not in CIRCUMSTANTIAL_CAUSES

    @property
    def is_specific(self) -> bool:
        """Whether equal texts mean the same failure; False for failures that can happen to any rank of any run."""
        return self.status != Status.COMM_ERROR and self.name not in ("killed", "host_oom", "foreign_memory")


CAUSE_BY_NAME = {cause.name: cause for cause in (
    # Hardware comes first, since its faults cause others; errors of peers of a dead rank come last.
    Cause("ecc_error", Status.NODE_FAIL, "uncorrectable GPU memory error",
           r"uncorrectable (?:NVLink )?ECC|uncorrectable NVLink error|\bXid\b.*: (?:48|63|64|74|94|95)\b"),
    Cause("xid", Status.NODE_FAIL, "a GPU failed",
           r"\bXid\b.*: (?:61|62|79|119|120)\b|fallen off the bus|GPU is lost|Unable to determine the device handle"),
    Cause("gpu_unavailable", Status.NODE_FAIL, "a GPU cannot be used",
           r"no CUDA-capable device is detected|CUDA-capable device\(s\) is/are busy or unavailable|"
           r"system not yet initialized|Found no NVIDIA driver|CUDA error: unknown error|"
           r"Unexpected error from cudaGetDeviceCount|\bError 80[0-9]: |No CUDA GPUs are available|"
           r"unsupported display driver / cuda driver|forward compatibility was attempted|"
           r"CUDA (?:driver )?initialization (?:failed|error)|CUDA unknown error|Failed to initialize NVML|"
           r"Driver/library version mismatch|NVML(?:Error)?_?\w*(?:LibRmVersionMismatch|DriverNotLoaded|GpuIsLost)|"
           r"nvidia-smi has failed|couldn't communicate with the NVIDIA driver|No supported gpu backend found|"
           r"CUDA_ERROR_(?:NO_DEVICE|NOT_INITIALIZED|SYSTEM_\w+|COMPAT_\w+|UNKNOWN|DEVICE_UNAVAILABLE)"),
    Cause("foreign_memory", Status.CRASH, "other processes used the GPU's memory"),
    Cause("cuda_oom", Status.OOM, "out of GPU memory",
           r"CUDA out of memory|CUDA error: out of memory|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?ALLOC_FAILED|"
           r"Cuda failure (?:\d+ )?'out of memory'|torch\.(?:cuda\.)?OutOfMemoryError"),
    Cause("host_oom", Status.OOM, "the host ran out of memory",
           r"Out of memory: Killed process|[Dd]etected \d+ oom.kill event"),
    Cause("cpu_oom", Status.OOM, "out of memory",
           r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|(?:^|[\s.])\w*MemoryError\b|std::bad_alloc|"
           r"^(?!.*ibv_).*(?:C|c)annot allocate memory"),
    Cause("non_finite_loss", Status.INVALID, "the loss is not finite"),
    Cause("replicas_differ", Status.INVALID, "replicas of the parameters differ"),
    Cause("option_ignored", Status.INVALID, "an option was ignored"),
    Cause("disk_full", Status.CRASH, "a disk is full",
           r"No space left on device|Disk quota exceeded|database or disk is full"),
    Cause("disk_error", Status.CRASH, "a disk cannot be used",
           r"Read-only file system|OSError: \[Errno 5\]|Input/output error|Structure needs cleaning|"
           r"Transport endpoint is (?:not connected|already connected)|Remote I/O error|No such device or address: '/"),
    Cause("download_failed", Status.CRASH, "a download failed",
           r"HTTPS?ConnectionPool\(|Max retries exceeded with url|NewConnectionError|NameResolutionError|"
           r"(?:requests|urllib3|httpx|httpcore|aiohttp|huggingface_hub|botocore|boto3|gcsfs|s3fs|google\.api_core|"
           r"google\.auth|azure|wandb|mlflow|modelscope|datasets)\.[\w.]*(?:Error|Exception|Timeout)\b|"
           r"EndpointConnectionError|SSLError|SSLCertVerificationError|ProxyError|ConnectTimeout|ReadTimeoutError|"
           r"urllib\.error\.URLError|HTTPError\b|We couldn't connect to 'https?://|LocalEntryNotFoundError|"
           r"Temporary failure in name resolution|Name or service not known: 'https?://|OfflineModeIsEnabled"),
    Cause("missing_library", Status.CRASH, "a library is missing or incompatible",
           r"cannot open shared object file|undefined symbol|version `\S+' not found|"
           r"CUDA driver version is insufficient|no kernel image is available"),
    Cause("import_error", Status.CRASH, "a module cannot be imported",
           r"(?:^|[\s.])(?:ImportError|ModuleNotFoundError): |^\S*python\S*: No module named "),
    Cause("illegal_memory_access", Status.CRASH, "illegal memory access in a GPU kernel",
           r"an illegal memory access was encountered|misaligned address|unspecified launch failure|"
           r"illegal instruction was encountered|CUDA_ERROR_ILLEGAL_ADDRESS"),
    Cause("assertion", Status.CRASH, "an assertion failed",
           r"(?:^|[\s.])AssertionError\b|[Aa]ssertion `.*[`'] failed|device-side assert triggered"),
    Cause("nccl_usage", Status.CRASH, "NCCL rejected a call",
           r"ncclInvalid(?:Usage|Argument)|Duplicate GPU detected|[Mm]ismatched NCCL version"),
    Cause("bus_error", Status.CRASH, "bus error, often caused by a full /dev/shm",
           r"killed by signal: Bus error|out of shared memory|Fatal Python error: Bus error", signals=(SIGBUS,)),
    Cause("segfault", Status.CRASH, "segmentation fault", r"Python error: Segmentation fault", signals=(SIGSEGV,)),
    Cause("killed", Status.CRASH, "killed from outside", r"killed by signal: (?:Killed|Terminated)",
           signals=(SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGUSR2)),
    Cause("signal", Status.CRASH, "killed by a signal"),
    Cause("abort", Status.CRASH, "aborted", signals=(SIGABRT,)),
    Cause("exception", Status.CRASH, "exception"),
    Cause("port_taken", Status.CRASH, "its port was already in use", r"Address already in use|EADDRINUSE"),
    Cause("exit_code", Status.CRASH, "ended with an error"),
    Cause("exited_early", Status.CRASH, "exited before it was done"),
    Cause("nccl_timeout", Status.COMM_ERROR, "NCCL timed out",
           r"caught collective operation timeout|NCCL watchdog .*timed? ?out|\[PG .*Timeout\(ms\)=\d+\) ran for"),
    Cause("nccl_error", Status.COMM_ERROR, "NCCL failed",
           r"NCCL error|nccl(?:System|Remote|Internal|UnhandledCuda)Error|NCCL (?:communicator was aborted|WARN)|"
           r"Some NCCL operations have failed or timed out|ibv_\w+ failed"),
    Cause("gloo_error", Status.COMM_ERROR, "gloo failed",
           r"gloo/|[Gg]loo (?:connect|error)|monitoredBarrier|Timed out waiting \d+ms for"),
    Cause("connection_error", Status.COMM_ERROR, "a connection failed",
           r"Connection (?:reset|closed|refused|aborted|timed out|was likely closed)|Dist(?:Network|Store)Error|"
           r"Broken pipe|DistBackendError|No route to host|Network is unreachable|[Ss]ocket Timeout|"
           r"client socket has (?:failed|timed out)"),
)}  # fmt: skip
"""Name -> cause. Roots come before their consequences; the first cause whose text matches a log is the cause."""

MAX_MESSAGE_LINES = 8
"""Lines of the longest exception message, that of NCCL; if more lines follow, the program has continued."""
MAX_LINE_CHARS = 300
"""Longest line, in characters, that is quoted."""

_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Failure)\b(?::|$)", re.MULTILINE)
_STACK_LINE = re.compile(r"^(?:\s|frame #\d+|Traceback \(most recent|Exception raised from )")
_CHAIN_TEXTS = ("The above exception was the direct cause", "During handling of the above exception")
_TRACEBACK_START = "Traceback (most recent call last):"
_WARNING_WORD = re.compile(r"\bwarn(?:ing)?\b", re.IGNORECASE)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch.distributed puts it before a traceback


def ending_lines(text: str) -> list[str]:
    """The lines of a log that tell how it ended: from the last traceback on if there is one, without stacks.

    The source lines of a stack, and errors that a program has caught, may contain any word.
    """
    *earlier_parts, last_part = _RANK_PREFIX.sub("", text).split(_TRACEBACK_START)
    while earlier_parts and any(chain_text in earlier_parts[-1] for chain_text in _CHAIN_TEXTS):
        last_part = earlier_parts.pop() + last_part
    return [line.strip() for line in last_part.splitlines() if line.strip() and not _STACK_LINE.match(line)]


def _has_continued(lines: list[str], index: int) -> bool:
    """Whether a program continued after line `index`: it is a warning, or more than MAX_MESSAGE_LINES lines follow."""
    later_lines = [line for line in lines[index + 1 :] if not _WARNING_WORD.search(line)]
    if _EXCEPTION.match(lines[index]):  # any number of lines from a logger may follow an exception
        return any(_EXCEPTION.match(line) for line in later_lines)
    return bool(_WARNING_WORD.search(lines[index])) or len(later_lines) > MAX_MESSAGE_LINES


def cause_by_text(text: str, only_uncaught: bool = False) -> tuple[Cause, str] | None:
    """The first cause that a line of the last words of a log shows, and that line.

    Args:
        only_uncaught: return None unless the log seems to end with an uncaught exception.
    """
    lines, (_, traceback_start, end_text) = ending_lines(text), text.rpartition(_TRACEBACK_START)
    final_lines = ending_lines(end_text) if traceback_start else []
    is_uncaught = final_lines and _EXCEPTION.match(final_lines[0]) and len(final_lines) <= MAX_MESSAGE_LINES
    if only_uncaught and not is_uncaught:
        return None
    for cause in CAUSE_BY_NAME.values():
        for index, line in enumerate(lines):
            is_shown = cause.pattern and re.search(cause.pattern, line)
            if is_shown and (cause.status != Status.OOM or not _has_continued(lines, index)):
                return cause, quoted(line)
    exception_lines = [line for line in lines if _EXCEPTION.search(line)]
    return (CAUSE_BY_NAME["exception"], quoted(exception_lines[-1])) if exception_lines else None


def last_line(text: str) -> str:
    """The last line of a log that is not empty and not part of a stack."""
    lines = ending_lines(text) or text.splitlines()
    return next((quoted(line) for line in reversed(lines) if line.strip()), "(empty log)")


def quoted(text: str) -> str:
    """A text as one line of at most MAX_LINE_CHARS characters."""
    return " ".join(text.split())[:MAX_LINE_CHARS]
