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

Values = dict[str, dict[str, float | None]]
PORT_COUNTERS = {
    "symbol_error": 0xFFFF, "link_error_recovery": 0xFF, "link_downed": 0xFF, "port_rcv_errors": 0xFFFF,
    "local_link_integrity_errors": 0xF, "excessive_buffer_overrun_errors": 0xF,
}  # fmt: skip
"""Counter of a port -> the number at which it stops counting. Source: drivers/infiniband/core/sysfs.c of Linux."""
DOWN, ACTIVE, DISABLED = 1, 4, 3
"""Two values of `state` and one value of `phys_state` of a port. Source: drivers/infiniband/core/sysfs.c of Linux."""
NVLINKS = 18
"""Largest number of NVLinks of a GPU: nvml.h, NVML_NVLINK_MAX_LINKS."""
LINK_ERRORS = {"replay": 0, "recovery": 1}
CRC_ERRORS = {"CRC flit": 2, "CRC data": 3}
"""Errors of an NVLink: nvml.h, NVML_NVLINK_ERROR_DL_*."""
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
"""Kinds of ECC errors: nvml.h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC and NVML_AGGREGATE_ECC."""


def main() -> None:
    """Answers each line of stdin; a source that fails adds nothing."""
    root, scratch, gpus = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sources: tuple[Callable[[], Values], ...] = (
        partial(_settings, root), partial(_folders, root, scratch), partial(_cpus, root), partial(_numa, root, gpus),
        partial(_ports, root), partial(_access, root), partial(_gpus, gpus),
    )  # fmt: skip
    for _ in sys.stdin:
        for read_source in sources:
            with contextlib.suppress(OSError, ValueError):
                print(json.dumps(read_source()), flush=True)
        print(flush=True)


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> float | None:
    """The number with which a file begins, such as 4 of `4: ACTIVE`; None without one."""
    with contextlib.suppress(LookupError, ValueError):
        return float(_text(path).split()[0].rstrip(":"))
    return None


def _settings(root: Path) -> Values:
    """The limit of locked memory, and the variables of NCCL."""
    has_ports = any((root / "sys/class/infiniband").glob("*/ports/*"))
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit_text = f"{limit_bytes >> 10} KiB" if limit_bytes != resource.RLIM_INFINITY else "unlimited"
    is_limited = 0 if limit_text == "unlimited" else 1 if has_ports else None
    switch_names = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", *(("NCCL_IB_DISABLE",) if has_ports else ())}
    disabling_pairs = {"nccl_p2p_level=loc", *(("nccl_net=socket",) if has_ports else ())}
    disabling_values = {
        f"{name}={value}": 1.0
        for name, value in sorted(os.environ.items())
        if (name in switch_names and value not in ("", "0")) or f"{name}={value}".lower() in disabling_pairs
    }
    return {"locked memory": {limit_text: is_limited}, "NCCL variables": {"NCCL_*": 0.0, **disabling_values}}


def _folders(root: Path, scratch: Path) -> Values:
    """The free space of shared memory and of the temporary folder."""
    free_gib: Values = {}
    for name, folder in {"/dev/shm": root / "dev/shm", "scratch": scratch}.items():
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            free_gib[name] = {str(folder): disk.f_bavail * disk.f_frsize / 2**30}
    return free_gib


def _cpus(root: Path) -> Values:
    """The governors of the cores, and whether Linux moves memory between NUMA nodes."""
    system = root / "sys/devices/system"
    governors = Counter(map(_text, system.glob("cpu/cpu[0-9]*/cpufreq/scaling_governor")))
    slow_cores_by_governor: dict[str, float | None] = {
        governor: (0 if governor == "performance" else n) if governor else None
        for governor, n in governors.items()
    }
    num_numa_nodes = len(list(system.glob("node/node[0-9]*")))
    is_balancing = 0.0 if num_numa_nodes == 1 else _number(root / "proc/sys/kernel/numa_balancing")
    return {"CPU governor": slow_cores_by_governor, "NUMA balancing": {"kernel.numa_balancing": is_balancing}}


def _numa(root: Path, gpus: Sequence[Any]) -> Values:
    """Whether the NUMA node of each GPU has none of the cores that this process may use."""
    if not gpus:
        return {}
    from ultrabench.agent.ranks.fork_server import numa_node_of, numa_nodes

    usable_nodes = numa_nodes(root / "sys", tuple(os.sched_getaffinity(0)))
    far_by_gpu = dict[str, float | None]()
    for number, _, bus_id, *_ in gpus:
        numa_node = numa_node_of(root / "sys", bus_id)
        place = f"GPU {number} on NUMA node {numa_node}"
        far_by_gpu[place] = None if numa_node < 0 or not usable_nodes else numa_node not in usable_nodes
    return {"NUMA": far_by_gpu}


def _ports(root: Path) -> Values:
    """States, rates and errors of the ports of InfiniBand and RoCE; disabled ports are left out."""
    values: Values = defaultdict(dict)
    rates_by_board = defaultdict[str, dict[str, float | None]](dict)
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, counters, place = port.parents[1], port / "counters", f"{port.parents[1].name}:{port.name}"
        state, downs = _number(port / "state"), _number(counters / "link_downed")
        if _number(port / "phys_state") == DISABLED:
            continue
        is_lost = None if state is None or (state == DOWN and downs is None) else state == DOWN and downs != 0
        values["InfiniBand link lost"][place] = is_lost
        values["InfiniBand ports"][place] = None if state is None else state != ACTIVE
        if state == ACTIVE:
            rates_by_board[_text(device / "board_id")][place] = _number(port / "rate")
        for counter, max_count in PORT_COUNTERS.items():
            count = _number(counters / counter)
            values["InfiniBand errors"][f"{place} {counter}"] = count if (count or 0) < max_count else None
    for board, rates in rates_by_board.items():
        best_gbit_per_s = max(filter(None, rates.values()), default=0.0)
        for place, gbit_per_s in rates.items():
            values["InfiniBand rate"][place] = best_gbit_per_s - gbit_per_s if gbit_per_s and board else None
    return values


def _access(root: Path) -> Values:
    """Whether an adapter has no driver here, or this user cannot open its device, as in a container without it."""
    missing_by_device = dict[str, float | None]()
    for adapter in sorted((root / "sys/bus/pci/devices").glob("*")):
        # Class 0x0207 is InfiniBand; a virtual function may belong to somebody else.
        if _text(adapter / "class").startswith("0x0207") and not (adapter / "physfn").exists():
            missing_by_device[f"PCI {adapter.name}"] = not (adapter / "infiniband").is_dir()
    for verbs in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        device_file = root / "dev/infiniband" / verbs.name
        missing_by_device[f"/dev/infiniband/{verbs.name}"] = not os.access(device_file, os.R_OK | os.W_OK)
    return {"InfiniBand access": missing_by_device}


def _gpus(gpus: Sequence[Any]) -> Values:
    """Memory errors, links, power limits and clocks of the GPUs by NVML."""
    if not gpus:
        return {}
    from ultrabench.agent.ranks.gpus import SLOWDOWNS, ask_nvml

    ask_nvml("nvmlInit")
    values: Values = defaultdict(dict)
    for number, uuid, *_ in gpus:
        place, handle = f"GPU {number}", ask_nvml("nvmlDeviceGetHandleByUUID", uuid)

        def ask(query: str, *arguments: int, handle: Any = handle) -> Any:
            return None if handle is None else ask_nvml(query, handle, *arguments)

        values["ECC errors"][place] = ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE)
        values["ECC errors in its life"][place] = ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE)
        *_, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows") or (None, None)
        values["row remapping failed"][place] = has_failed
        values["row remapping pending"][place] = is_pending
        for link in (n for n in range(NVLINKS) if ask("nvmlDeviceGetNvLinkState", n)):
            for check, errors in (("NVLink errors", LINK_ERRORS), ("NVLink CRC errors", CRC_ERRORS)):
                for error, error_code in errors.items():
                    count = ask("nvmlDeviceGetNvLinkErrorCounter", link, error_code)
                    values[check][f"{place} link {link} {error}"] = count
        limits_mw = [ask(f"nvmlDeviceGetPowerManagement{name}Limit") for name in ("Default", "")]
        values["power limit"][place] = max(0, limits_mw[0] - limits_mw[1]) / 1e3 if all(limits_mw) else None
        slowdown_mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        values["GPU clocks"][place] = None if slowdown_mask is None else 0.0
        slowdowns = (text for bit, text in SLOWDOWNS.items() if (slowdown_mask or 0) & bit)
        values["GPU clocks"] |= {f"{place} {text}": 1.0 for text in slowdowns}
    return values


if __name__ == "__main__":
    main()
