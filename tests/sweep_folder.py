"""Folders of sweeps and their journals made by hand: a plan, and how attempts of its runs ended."""

from ultrabench.record import raw_json, to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import EVENTS, Claimed, Failed, Result
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.sweep_json import write_sweep_json
from ultrabench.sweep.plan_table import write_plan


def make_folder(path, content, candidates):
    """The folder of a sweep that was planned and not begun."""
    folder = SweepFolder(path)
    folder.create()
    write_sweep_json(folder, content)
    write_plan(candidates, folder.plan)
    return folder


def ended(status=Status.OK, **values):
    """How an attempt ended; an ok one took 0.1 s a step unless `values` say otherwise."""
    usual = {"step_times_s": (0.1,) * 6} if status == Status.OK else {}
    return RunResult(status=status, **usual | values)


def claimed(spec, key, allocation, **fields):
    return Claimed(**key._asdict(), allocation=allocation, spec=raw_json(spec), **fields)


def finished(spec, key, result, **fields):
    """The event that tells the result of an attempt."""
    kind = Result if result.status == Status.OK else Failed
    return kind(**key._asdict(), spec=to_dict(spec), result=result, **{"source": "agent"} | fields)


def attempted(spec, result=None, repeat=0, attempt=0, allocation="a0", **fields):
    """What the journal says of an attempt: that it was claimed and, if there is a result, how it ended."""
    key = AttemptKey(spec.run_id, repeat, attempt)
    claim = claimed(spec, key, allocation, **fields)
    return [claim] if result is None else [claim, finished(spec, key, result)]


def write(folder, *events, by="agent"):
    """Writes events into a journal of their own, of an agent or a launcher; returns its writer."""
    writer = JournalWriter(folder.journal, by)
    for event in events:
        writer.write(event)
    return writer


def events_of(folder, kind):
    """The events of one kind in the journals of a sweep."""
    return [line.event for line in read_journal(folder.journal) if type(line.event) is EVENTS[kind]]
