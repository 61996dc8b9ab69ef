"""The texts by which programs and libraries show causes of failures: one row for each family of texts.

A row says which library writes the text, so that it can be compared with the sources of a later version.
The texts are those of these versions: torch 2.13 (c10/cuda, c10/core, torch/csrc/distributed/c10d, torch/utils/data),
NCCL 2.30 (src/include/alloc.h, checks.h, cudawrap.h, src/init.cc, bootstrap.cc, transport/nvls.cc), RCCL of ROCm 7,
gloo of April 2026 (gloo/transport/tcp), Transformer Engine 2.20 (common/util/logging.h, cuda_driver.h),
cuDNN 9 (cudnnGetErrorString), Triton 3.4 (runtime/cache.py, runtime/errors.py, third_party/nvidia/backend),
CUDA 12.9 (cudaGetErrorString, cuGetErrorString, cublasGetStatusString), HIP of ROCm 7 and its HSA runtime, NVML 12,
glibc 2.39 (strerror, elf/dl-load.c), CPython 3.13, Linux 6.12 (mm/oom_kill.c), Slurm 25.05 (slurmstepd).
"""

import builtins
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ultrabench.agent.diagnose.log_lines import quoted
from ultrabench.agent.diagnose.log_record import Failure, FailureKind
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME, Cause
from ultrabench.batch_system import HOST_OOM
from ultrabench.result import Status
from ultrabench.xid import XidClass, xid_of


class Family(NamedTuple):
    """Texts of one library that show one cause."""

    name: str
    """The library and its error, such as `NCCL, memory of a GPU`."""
    cause: str
    pattern: re.Pattern[str]
    """Matches a line that shows the cause."""


def _family(name: str, cause: str, *patterns: str) -> Family:
    return Family(name, cause, re.compile("|".join(patterns)))


_OUT_OF_MEMORY = r"[Oo]ut of memory"
_CACHE_PATH = (
    r"\.triton/|triton[_-]?cache|torchinductor_|torch/?_?inductor|torch_extensions|/inductor_cache|ComputeCache"
    r"|\btmp\.pid_|triton/runtime/cache\.py|_inductor/(?:codecache|runtime|cpp_builder|triton_bundler)"
    r"|utils/cpp_extension\.py|/triton/\d+/"
)
"""Paths and source files of the compile caches of Triton, TorchInductor, CUDA and torch's extensions."""
_CACHE_RACE = (
    r"\bFileNotFoundError: |\bFileExistsError: |\[Errno (?:2|16|17|26|39|116)\]|Stale file handle"
    r"|cannot (?:stat|open) shared object|file too short|invalid ELF header|JSONDecodeError|unexpected "
    r"EOF|Text file busy"
    r"|EOFError|Ran out of input|UnpicklingError|pickle data was truncated"
)
"""What a process sees in a compile cache that another one changes meanwhile."""

FAMILIES = (
    # Hardware comes first, since its faults cause others; errors of peers of a dead rank come last.
    _family("CUDA, ECC", "ecc_error",
            r"uncorrectable (?:NVLink )?ECC", r"cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE"),
    _family("CUDA and driver, lost GPU", "xid",
            r"fallen off the bus|GpuIsLost|Unable to determine the device handle|GPU is lost\. +Reboot",
            r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable|over nvlink or a hardware error"),
    _family("AMD driver, RAS", "ecc_error", r"uncorrectable hardware error|RAS.*poison consumption"),
    _family("CUDA, device", "gpu_unavailable",
            r"no CUDA-capable device is detected|CUDA-capable device\(s\) is/are busy or unavailable",
            r"system not yet initialized|Found no NVIDIA driver|CUDA error: unknown error|CUDA unknown "
            r"error|\bError 80[0-9]: ",
            r"Unexpected error from cudaGetDeviceCount|No (?:CUDA|HIP) GPUs are available|No supported gpu "
            r"backend found",
            r"CUDA (?:driver )?initialization (?:failed|error)|CUDA error: initialization error",
            r"unsupported display driver / cuda driver|forward compatibility was attempted",
            r"CUDA_ERROR_(?:NO_DEVICE|NOT_INITIALIZED|SYSTEM_\w+|COMPAT_\w+|UNKNOWN|DEVICE_UNAVAILABLE)"),
    _family("HIP, device", "gpu_unavailable", r"no ROCm-capable device is detected|hipErrorNoDevice"),
    _family("NVML, driver", "gpu_unavailable",
            r"Driver/library version mismatch|NVML(?:Error)?_?\w*(?:LibRmVersionMismatch|DriverNotLoaded)|Failed "
            r"to initialize NVML",
            r"nvidia-smi has failed|couldn't communicate with the NVIDIA driver"),
    _family("NCCL, fabric manager", "gpu_unavailable",
            r"NVLink SHARP \(NVLS\) Multicast|Fabric Manager or NVSwitch|[Ff]abric ?[Mm]anager.*(?:not|fail)"),
    _family("Linux and batch systems, memory of the host", "host_oom",
            rf"Out of memory: Killed process|{HOST_OOM}", r"ray\.exceptions\.OutOfMemoryError"),
    _family("glibc, static TLS", "missing_library", r"cannot allocate memory in static TLS block"),
    _family("CUDA, memory of a GPU", "cuda_oom",
            r"(?i:\b(?:cuda|hip|xpu)\b.{0,60}?\b(?:error|failure|failed)\b.{0,60}?\bout of memory)",
            rf"(?:CUDA|HIP|XPU|MPS backend) {_OUT_OF_MEMORY}",
            r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|cudaMalloc\w* failed: "
            r"out of memory"),
    _family("torch, memory of a GPU", "cuda_oom",
            r"(?:torch|cuda|cupy\.cuda\.memory)\.OutOfMemoryError|^OutOfMemoryError\b",
            r"NVML_SUCCESS == .*INTERNAL ASSERT FAILED at .*CUDACachingAllocator",
            r"would exceed allowed memory\. \(out of memory\)"),
    _family("CUDA libraries, memory of a GPU", "cuda_oom",
            r"CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED",
            r"cuBLAS Error: the resource allocation failed|ROCBLAS_STATUS_MEMORY_ERROR|rocblas_status_memory_error",
            r"HIPBLAS_STATUS_ALLOC_FAILED"),
    _family("NCCL, memory of a GPU", "cuda_oom", rf"(?:Cuda|HIP) failure (?:\d+ )?'{_OUT_OF_MEMORY}'",
            r"Failed to CUDA (?:m|c)alloc"),
    _family("Triton, memory of a GPU", "cuda_oom", rf"Triton Error \[\w+\]: {_OUT_OF_MEMORY}"),
    _family("XLA, memory of a GPU", "cuda_oom", r"RESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|allocat)"),
    _family("HSA, memory of a GPU", "cuda_oom", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    _family("memory of a process", "cpu_oom",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|(?:^|[\s.])\w*MemoryError\b|std::bad_alloc",
            r"^(?!.*ibv_).*[Cc]annot allocate memory", r"HOST_ALLOCATION_FAILED|Failed to (?:CUDA host alloc|malloc) "),
    _family("compile caches", "compile_cache", rf"^(?=.*(?:{_CACHE_PATH}))(?=.*(?:{_CACHE_RACE}))"),
    _family("disk, full", "disk_full", r"No space left on device|Disk quota exceeded|database or disk is full"),
    _family("disk, error", "disk_error", r"Read-only file system|Input/output error|Structure needs cleaning",
            r"\[Errno (?:5|30|117|121)\]|Remote I/O error|Transport endpoint is (?:not connected|already connected)",
            r"No such device or address: '/"),
    _family("network file system, stale file", "stale_file", r"Stale (?:NFS )?file handle"),
    _family("downloads", "download_failed",
            r"HTTPS?ConnectionPool\(|Max retries exceeded with url|NewConnectionError|NameResolutionError|gaierror",
            r"\b(?:requests|urllib3|httpx|httpcore|aiohttp|huggingface_hub|botocore|boto3|gcsfs|s3fs"
            r"|google\.api_core|google\.auth"
            r"|azure|wandb|mlflow|modelscope|datasets)\.[\w.]*(?:Error|Exception|Timeout)\b",
            r"EndpointConnectionError|SSL(?:CertVerification)?Error|ProxyError|ConnectTimeout|ReadTimeoutError",
            r"urllib\.error\.URLError|HTTPError\b|We couldn't connect to "
            r"'https?://|LocalEntryNotFoundError|OfflineModeIsEnabled",
            r"Temporary failure in name resolution|Name or service not known: "
            r"'https?://|ProxyError|https?://.*timed out"),
    _family("loader, library", "missing_library",
            r"cannot open shared object file|undefined symbol|version `\S+' not found|error while loading "
            r"shared libraries",
            r"CUDA driver version is insufficient|no kernel image is available|compiled with an unsupported toolchain",
            r"HIP error: invalid device function|hipErrorNoBinaryForGpu",
            r"CUDNN_STATUS_(?:SUBLIBRARY_)?(?:LOADING_FAILED|VERSION_MISMATCH)"),
    _family("Python, import", "import_error",
            r"(?:^|[\s.])(?:ImportError|ModuleNotFoundError): |^\S*python\S*: No module named "),
    _family("CUDA, fault in a GPU kernel", "illegal_memory_access",
            r"an illegal memory access was encountered|misaligned address|unspecified launch failure",
            r"an illegal instruction was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|hardware stack error|invalid "
            r"program counter"),
    _family("HIP, fault in a GPU kernel", "illegal_memory_access",
            r"Memory access fault by GPU|HW Exception by GPU|hipErrorIllegalAddress",
            r"HSA_STATUS_ERROR_(?:MEMORY_(?:APERTURE_VIOLATION|FAULT)|EXCEPTION|ILLEGAL_INSTRUCTION)"),
    _family("assertions", "assertion",
            r"(?:^|[\s.])AssertionError\b|[Aa]ssertion [`'].*[`'] failed|device-side assert triggered"),
    _family("NCCL, no interface", "no_interface", r"no socket interface found|NET/Socket : No (?:usable )?interface"),
    _family("NCCL, usage", "nccl_usage",
            r"ncclInvalid(?:Usage|Argument)|Duplicate GPU detected|[Mm]ismatched NCCL version"),
    _family("shared memory", "bus_error", r"killed by signal: Bus error|out of shared memory"),
    _family("torch, data loader", "segfault", r"killed by signal: Segmentation fault"),
    _family("torch, aborted data loader", "abort", r"killed by signal: Aborted"),
    _family("torch, killed data loader", "killed",
            r"killed by signal: (?:Killed|Terminated|Hangup|Interrupt)|^KeyboardInterrupt\b"),
    _family("torchrun, ended from outside", "killed", r"SignalException: Process \d+ got signal: (?:1|2|15)\b"),
    _family("port", "port_taken", r"Address already in use|EADDRINUSE"),
    _family("torch, watchdog of NCCL", "nccl_timeout",
            r"caught collective operation timeout|watchdog .*timed? ?out|\[PG .*Timeout\(ms\)=\d+\) ran for",
            r"Heartbeat monitor timed out|watchdog got stuck for|collective operation timeout",
            r"dump signal due to a collective timeout|debug info, due to (?:collective timeout|ProcessGroupNCCL "
            r"watchdog hang)"),
    _family("NCCL and RCCL", "nccl_error",
            r"NCCL [Ee]rror|[nr]ccl(?:System|Remote|Internal|UnhandledCuda)Error|NCCL (?:communicator was "
            r"aborted|WARN)",
            r"Some NCCL operations have failed or timed out|ibv_\w+ failed|RCCL [Ee]rror"),
    _family("gloo", "gloo_error", r"gloo/\S+\.(?:cc|h):\d+|[Gg]loo (?:connect|error)|monitoredBarrier|Timed out "
    r"waiting \d+ms for"),
    _family("sockets", "connection_error",
            r"Connection (?:reset|closed|refused|aborted|timed out|was likely closed)|Dist(?:Network|Store)Error",
            r"Broken pipe|DistBackendError|No route to host|Network is unreachable|[Ss]ocket Timeout",
            r"client socket has (?:failed|timed out)",
            r"^(?:BrokenPipe|Connection(?:Aborted|Refused|Reset)?)Error\b"),
    _family("torchrun, rendezvous", "connection_error",
            r"\.Rendezvous(?:Closed|Connection|GracefulExit|Timeout)Error\b"),
    _family("JAX, distributed service", "connection_error",
            r"Terminating process because the (?:JAX|coordinat\w+)|distributed service detected fatal errors",
            r"(?:JAX|[Cc]oordination|distributed) service.{0,60}(?:heartbeat|timed? ?out|unavailable|disconnect)"),
)  # fmt: skip
"""Texts and their causes. Roots come before their consequences; of several families that match,
the first one counts."""

_EXCEPTION_TYPE = re.compile(r"(?:(\w+)\.)?(?:\w+\.)*(\w+)(?::|$)")
_PROGRAM_ERRORS = (
    ArithmeticError, AttributeError, BufferError, LookupError, NameError, NotImplementedError, RecursionError,
    ReferenceError,
    StopAsyncIteration, StopIteration, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of Python for faults of a program; their messages quote what the program has, in any words."""
_PATH_ERRORS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Exceptions of Python that a path causes; their messages quote the path."""
_PATH_CAUSES = frozenset({"compile_cache", "disk_full", "disk_error", "stale_file", "missing_library"})
"""The causes that the message of one of _PATH_ERRORS can show."""
_TRITON_OUT_OF_RESOURCES = "OutOfResources"
"""Triton's exception for a GPU kernel that needs more shared memory or registers than the GPU has."""
_PACKAGES_OF_RUNS = frozenset({
    "accelerate", "asyncio", "colossalai", "concurrent", "cupy", "cupy_backends", "cupyx", "deepspeed", "grpc",
    "horovod",
    "jax", "jaxlib", "lightning", "lightning_fabric", "megatron", "mpi4py", "multiprocessing", "nccl", "paddle",
    "pytorch_lightning", "ray", "socket", "ssl", "tensorflow", "torch", "torch_xla", "transformer_engine", "zmq",
})  # fmt: skip
"""Packages whose exceptions can say that ranks of a run lost each other; others talk to services,
such as data bases."""
_MISSING_SYMBOL = re.compile(r"AttributeError: /\S+: undefined symbol: ")
_QUOTED_TEXT = re.compile(r"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)")
_ASSERTION = re.compile(r"(?:[\w.]*\.)?AssertionError\b|.*[Aa]ssertion [`'].*[`'] failed")
_REQUEST = re.compile(r"[Tt]ried to allocate (?:more than 1EB|(\d+(?:\.\d+)?) ([GTPE]iB|bytes))")
ABSURD_GIB = 2.0**20
"""Size in GiB (1 PiB) of a request that no layout makes; after an error of communication sizes may hold any number."""
_GIB_PER_UNIT = {"bytes": 2.0**-30, "GiB": 1.0, "TiB": 2.0**10, "PiB": 2.0**20, "EiB": 2.0**30}
_DRIVER_RANK = -1
"""The place of causes that an Xid shows: before all families."""
_ASSERTION_RANK = next(rank for rank, family in enumerate(FAMILIES) if family.cause == "assertion")
_IS_CACHE_PATH, _IS_CACHE_RACE = re.compile(_CACHE_PATH).search, re.compile(_CACHE_RACE).search


def _ranked_cause(line: str) -> tuple[int, Cause] | None:
    """The place in FAMILIES of the first family that a line shows, and its cause; None if it shows none."""
    if _ASSERTION.match(line):
        return _ASSERTION_RANK, CAUSE_BY_NAME["assertion"]
    exception_match = _EXCEPTION_TYPE.match(line)
    package, type_name = exception_match.groups() if exception_match else (None, "")
    builtin_type = None if package else _builtin_exception(type_name)
    if xid := xid_of(line) if builtin_type is None else None:
        fatal_name = "ecc_error" if xid.is_memory_error else "xid"
        name_by_class = {XidClass.FATAL: fatal_name, XidClass.APPLICATION: "illegal_memory_access"}
        name = name_by_class.get(xid.xid_class)
        return (_DRIVER_RANK, CAUSE_BY_NAME[name]) if name else None
    is_of_program = builtin_type is not None and issubclass(builtin_type, _PROGRAM_ERRORS)
    if type_name == _TRITON_OUT_OF_RESOURCES or (is_of_program and not _is_symbol_error(builtin_type, line)):
        return None
    quotes = _quotes_of(line) if builtin_type is not None and not issubclass(builtin_type, OSError) else []
    pair = next(((n, family) for n, family in enumerate(FAMILIES) if _shows(family, line, quotes)), None)
    if pair is None:
        return None
    cause = CAUSE_BY_NAME[pair[1].cause]
    is_about_path = builtin_type is not None and issubclass(builtin_type, _PATH_ERRORS)
    if is_about_path and cause.name not in _PATH_CAUSES:
        return None
    if cause.status == Status.COMM_ERROR and package is not None and package not in _PACKAGES_OF_RUNS:
        return None
    return None if cause.status == Status.OOM and _is_absurd_request(line) else (pair[0], cause)


def _builtin_exception(name: str) -> type[BaseException] | None:
    """Python's exception with this name; None if it has none."""
    value = getattr(builtins, name, None) if name else None
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def _is_symbol_error(exception_type: type[BaseException] | None, line: str) -> bool:
    """Whether a line is that of ctypes about a symbol which a library lacks."""
    return exception_type is AttributeError and bool(_MISSING_SYMBOL.match(line))


def _quotes_of(line: str) -> list[tuple[int, int]]:
    """Where the quoted texts of a line begin and end; they are what the program has, not what happened."""
    return [match.span() for match in _QUOTED_TEXT.finditer(line)]


def _shows(family: Family, line: str, quotes: Sequence[tuple[int, int]]) -> bool:
    """Whether a line shows the family outside its quoted texts."""
    if not quotes:
        return family.pattern.search(line) is not None
    spans = (match.span() for match in family.pattern.finditer(line))
    return any(not any(start <= s and e <= end for start, end in quotes) for s, e in spans)


def _is_absurd_request(line: str) -> bool:
    match = _REQUEST.search(line)
    return bool(match and (match[1] is None or float(match[1]) * _GIB_PER_UNIT[match[2]] >= ABSURD_GIB))


def cause_of_lines(lines: Iterable[str]) -> tuple[Cause, str] | None:
    """The cause of the first family that some line shows, and the first such line; None if they show none."""
    ranked = ((ranked_cause, line) for line in lines if (ranked_cause := _ranked_cause(line)))
    first = min(ranked, key=lambda pair: pair[0][0], default=None)
    return first and (first[0][1], quoted(first[1]))


def cause_of_failure(failure: Failure) -> tuple[Cause, str]:
    """The cause of a failure in a log, and the line that shows it; `exception` or `abort` if its texts show none."""
    if failure.signal is not None:
        return cause_of_signal(failure.signal), quoted(failure.lines[0])
    last_line = quoted(failure.lines[-1]) if failure.lines else ""
    default_cause = CAUSE_BY_NAME["abort" if failure.kind is FailureKind.FATAL else "exception"]
    cause, line = cause_of_lines(failure.lines) or (default_cause, last_line)
    is_vague = cause.name in ("exception", "stale_file", "import_error")
    if is_vague and any(map(_IS_CACHE_RACE, failure.lines)) and any(map(_IS_CACHE_PATH, failure.frames)):
        cause = CAUSE_BY_NAME["compile_cache"]
    return cause, line


def cause_of_signal(number: int) -> Cause:
    """The cause that a signal shows which ultrabench did not send."""
    return next(
        (cause for cause in CAUSE_BY_NAME.values() if number in cause.signals), CAUSE_BY_NAME["signal"]
    )


def cause_by_text(text: str) -> tuple[Cause, str] | None:
    """The cause that the lines of a message show, and that line; None if they show none."""
    return cause_of_lines(line.strip() for line in text.splitlines())
