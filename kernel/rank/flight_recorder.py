"""What torch's flight recorder knows of the collectives of a rank; neither it nor torch's table of groups is public."""

import json
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

GROUP_NAMES = {"default_pg": "world", "undefined": "ranks"}
"""Name of a group in torch -> our name; the groups of a mesh have the names of their axes."""


def last_collectives() -> list[dict[str, Any]]:
    """The collectives of each process group of this rank: how many it has entered, started and finished.

    They come from torch's flight recorder, which is on by default; if it does not know a group, only the
    sequence number of the group is known. Items are {group, ranks, entered, started, finished, ops}; `ops`
    maps numbers to names of the first unfinished collectives, or of the last one. Unknown values are None.
    """
    entries_by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in _flight_record():
        if not entry["is_p2p"]:
            entries_by_group.setdefault(entry["process_group"][0], []).append(entry)
    records = []
    for group, group_name in dist.distributed_c10d._world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            axis = group.group_desc.removeprefix("mesh_")
            progress = _collective_progress(entries_by_group.get(group_name, []))
            progress["entered"] = progress["entered"] or group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            records.append({"group": GROUP_NAMES.get(axis, axis), "ranks": ranks, **progress})
    return records


def _collective_progress(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """How far one group has come: the highest number of its collectives that is entered, started and finished."""
    finished_ids = [e["collective_seq_id"] for e in entries if e["retired"] or e["state"] == "completed"]
    started_ids = [e["collective_seq_id"] for e in entries if e["state"] == "started"]
    # A retired NCCL collective has begun; a collective of gloo stays "scheduled" until it ends.
    last_started_id = None
    if any(entry["state"] != "scheduled" for entry in entries):
        last_started_id = max([*started_ids, *finished_ids], default=None)
    unfinished = [e for e in entries if e["collective_seq_id"] not in finished_ids]
    shown_entries = unfinished[:4] or entries[-1:]
    return {
        "entered": max((e["collective_seq_id"] for e in entries), default=None),
        "started": last_started_id,
        "finished": max(finished_ids, default=0) if entries else None,
        "ops": {e["collective_seq_id"]: e["profiling_name"].partition(":")[2] for e in shown_entries},
    }


def _flight_record() -> list[dict[str, Any]]:
    """The entries of both flight recorders (one is for NCCL, one for all others), in order."""
    function_names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dump_functions = (getattr(_distributed_c10d, name, None) for name in function_names)
    recorder_dumps = [json.loads(dump(True, False)) for dump in dump_functions if dump is not None]
    return [entry for recorder_dump in recorder_dumps for entry in recorder_dump.get("entries", [])]
