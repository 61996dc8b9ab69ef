"""Reads the health of this node: `python -P -m ultrabench.agent.health_sources ROOT SCRATCH GPUS`.

For each line on stdin it prints a JSON object for each source, {check: {place: number or null}}, and then an empty
line. It is a process of its own because a broken driver may block its reader inside Linux; it imports little, so that
it starts fast. The table of `ultrabench/node_health.py` explains each check.
"""

import contextlib
import json
import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

CheckNumbers = dict[str, dict[str, float | None]]
MAX_COUNT_BY_COUNTER = {
    "symbol_error": 0xFFFF, "link_error_recovery": 0xFF, "link_downed": 0xFF, "port_rcv_errors": 0xFFFF,
    "local_link_integrity_errors": 0xF, "excessive_buffer_overrun_errors": 0xF,
}  # fmt: skip
"""Counter of a port -> the number at which it stops counting. Source: drivers/infiniband/core/sysfs.c of Linux."""
DOWN, ACTIVE, DISABLED = 1, 4, 3
"""Two values of `state` and one value of `phys_state` of a port. Source: drivers/infiniband/core/sysfs.c of Linux."""
MAX_NVLINKS = 18
"""Largest number of NVLinks of a GPU: nvml.h, NVML_NVLINK_MAX_LINKS."""
LINK_ERROR_CODES = {"replay": 0, "recovery": 1}
CRC_ERROR_CODES = {"CRC flit": 2, "CRC data": 3}
"""Errors of an NVLink: nvml.h, NVML_NVLINK_ERROR_DL_*."""
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
"""Kinds of ECC errors: nvml.h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC and NVML_AGGREGATE_ECC."""


def main() -> None:
    """Answers each line of stdin; a source that fails adds nothing."""
    root, scratch, gpus = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sources: tuple[Callable[[], CheckNumbers], ...] = (
        partial(_process_settings, root), partial(_free_space, root, scratch), partial(_cpu_settings, root),
        partial(_gpu_placement, root, gpus), partial(_port_health, root), partial(_adapter_access, root),
        partial(_gpu_health, gpus),
    )  # fmt: skip
    for _ in sys.stdin:
        for read_source in sources:
            with contextlib.suppress(OSError, ValueError):
                print(json.dumps(read_source()), flush=True)
        print(flush=True)


def _read_text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def _read_number(path: Path) -> float | None:
    """The number with which a file begins, such as 4 of `4: ACTIVE`; None without one."""
    with contextlib.suppress(LookupError, ValueError):
        return float(_read_text(path).split()[0].rstrip(":"))
    return None


def _process_settings(root: Path) -> CheckNumbers:
    """The limit of locked memory, and the variables of NCCL."""
    has_ports = any((root / "sys/class/infiniband").glob("*/ports/*"))
    memlock_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock_text = f"{memlock_bytes >> 10} KiB" if memlock_bytes != resource.RLIM_INFINITY else "unlimited"
    is_limited = 0 if memlock_text == "unlimited" else 1 if has_ports else None
    switches = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", *(("NCCL_IB_DISABLE",) if has_ports else ())}
    disabling_pairs = {"nccl_p2p_level=loc", *(("nccl_net=socket",) if has_ports else ())}
    settings = {
        f"{name}={value}": 1.0
        for name, value in sorted(os.environ.items())
        if (name in switches and value not in ("", "0")) or f"{name}={value}".lower() in disabling_pairs
    }
    return {"locked memory": {memlock_text: is_limited}, "NCCL variables": {"NCCL_*": 0.0, **settings}}


def _free_space(root: Path, scratch_folder: Path) -> CheckNumbers:
    """The free space of shared memory and of the temporary folder."""
    free_gib: CheckNumbers = {}
    for check, folder in {"/dev/shm": root / "dev/shm", "scratch": scratch_folder}.items():
        with contextlib.suppress(OSError):
            filesystem = os.statvfs(folder)
            free_gib[check] = {str(folder): filesystem.f_bavail * filesystem.f_frsize / 2**30}
    return free_gib


def _cpu_settings(root: Path) -> CheckNumbers:
    """The governors of the cores, and whether Linux moves memory between NUMA nodes."""
    system_folder = root / "sys/devices/system"
    cores_by_governor = Counter(map(_read_text, system_folder.glob("cpu/cpu[0-9]*/cpufreq/scaling_governor")))
    slow_cores_by_governor: dict[str, float | None] = {
        governor: (0 if governor == "performance" else num_cores) if governor else None
        for governor, num_cores in cores_by_governor.items()
    }
    num_numa_nodes = len(list(system_folder.glob("node/node[0-9]*")))
    is_balancing = 0.0 if num_numa_nodes == 1 else _read_number(root / "proc/sys/kernel/numa_balancing")
    return {"CPU governor": slow_cores_by_governor, "NUMA balancing": {"kernel.numa_balancing": is_balancing}}


def _gpu_placement(root: Path, gpus: Sequence[Any]) -> CheckNumbers:
    """Whether the NUMA node of each GPU has none of the cores that this process may use."""
    if not gpus:
        return {}
    from ultrabench.agent.ranks.fork_server import cpus_by_numa_node, numa_node_of

    usable_nodes = cpus_by_numa_node(root / "sys", tuple(os.sched_getaffinity(0)))
    far_by_gpu = dict[str, float | None]()
    for number, _, bus_id, *_ in gpus:
        numa_node = numa_node_of(root / "sys", bus_id)
        place = f"GPU {number} on NUMA node {numa_node}"
        far_by_gpu[place] = None if numa_node < 0 or not usable_nodes else numa_node not in usable_nodes
    return {"NUMA": far_by_gpu}


def _port_health(root: Path) -> CheckNumbers:
    """States, rates and errors of the ports of InfiniBand and RoCE; disabled ports are left out."""
    numbers: CheckNumbers = defaultdict(dict)
    rates_by_board = defaultdict[str, dict[str, float | None]](dict)
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, counters, place = port.parents[1], port / "counters", f"{port.parents[1].name}:{port.name}"
        state, downs = _read_number(port / "state"), _read_number(counters / "link_downed")
        if _read_number(port / "phys_state") == DISABLED:
            continue
        is_lost = None if state is None or (state == DOWN and downs is None) else state == DOWN and downs != 0
        numbers["InfiniBand link lost"][place] = is_lost
        numbers["InfiniBand ports"][place] = None if state is None else state != ACTIVE
        if state == ACTIVE:
            rates_by_board[_read_text(device / "board_id")][place] = _read_number(port / "rate")
        for counter, max_count in MAX_COUNT_BY_COUNTER.items():
            count = _read_number(counters / counter)
            numbers["InfiniBand errors"][f"{place} {counter}"] = count if (count or 0) < max_count else None
    for board, rates in rates_by_board.items():
        best_gbit_per_s = max(filter(None, rates.values()), default=0.0)
        for place, gbit_per_s in rates.items():
            numbers["InfiniBand rate"][place] = best_gbit_per_s - gbit_per_s if gbit_per_s and board else None
    return numbers


def _adapter_access(root: Path) -> CheckNumbers:
    """Whether an adapter has no driver here, or this user cannot open its device, as in a container without it."""
    missing_by_device = dict[str, float | None]()
    for adapter in sorted((root / "sys/bus/pci/devices").glob("*")):
        # Class 0x0207 is InfiniBand; a virtual function may belong to somebody else.
        if _read_text(adapter / "class").startswith("0x0207") and not (adapter / "physfn").exists():
            missing_by_device[f"PCI {adapter.name}"] = not (adapter / "infiniband").is_dir()
    for verbs in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        device_file = root / "dev/infiniband" / verbs.name
        missing_by_device[f"/dev/infiniband/{verbs.name}"] = not os.access(device_file, os.R_OK | os.W_OK)
    return {"InfiniBand access": missing_by_device}


def _gpu_health(gpus: Sequence[Any]) -> CheckNumbers:
    """Memory errors, links, power limits and clocks of the GPUs by NVML."""
    if not gpus:
        return {}
    from ultrabench.agent.ranks.gpus import SLOWDOWN_BY_BIT, ask_nvml

    ask_nvml("nvmlInit")
    numbers: CheckNumbers = defaultdict(dict)
    for gpu_number, uuid, _, _, board_uuid in gpus:
        place, handle = f"GPU {gpu_number}", ask_nvml("nvmlDeviceGetHandleByUUID", board_uuid or uuid)

        def ask(function_name: str, *arguments: int, handle: Any = handle) -> Any:
            return None if handle is None else ask_nvml(function_name, handle, *arguments)

        numbers["ECC errors"][place] = ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE)
        numbers["ECC errors in its life"][place] = ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE)
        *_, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows") or (None, None)
        numbers["row remapping failed"][place] = has_failed
        numbers["row remapping pending"][place] = is_pending
        for link_number in (n for n in range(MAX_NVLINKS) if ask("nvmlDeviceGetNvLinkState", n)):
            for check, codes in (("NVLink errors", LINK_ERROR_CODES), ("NVLink CRC errors", CRC_ERROR_CODES)):
                for error_name, error_code in codes.items():
                    count = ask("nvmlDeviceGetNvLinkErrorCounter", link_number, error_code)
                    numbers[check][f"{place} link {link_number} {error_name}"] = count
        limits_mw = [ask(f"nvmlDeviceGetPowerManagement{limit_kind}Limit") for limit_kind in ("Default", "")]
        numbers["power limit"][place] = max(0, limits_mw[0] - limits_mw[1]) / 1e3 if all(limits_mw) else None
        slowdown_mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        numbers["GPU clocks"][place] = None if slowdown_mask is None else 0.0
        slowdowns = (text for bit, text in SLOWDOWN_BY_BIT.items() if (slowdown_mask or 0) & bit)
        numbers["GPU clocks"] |= {f"{place} {text}": 1.0 for text in slowdowns}
    return numbers


if __name__ == "__main__":
    main()
