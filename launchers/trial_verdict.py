"""Whether the trials of an acceptance run went as they have to, each failure with its remedy."""

from ultrabench.launchers.check import Check, failed, passed
from ultrabench.launchers.trial import Outcome
from ultrabench.result import Status
from ultrabench.sweep.losses import TOLERANCE


def judge_losses(one: Outcome, layouts: Outcome) -> Check:
    """Whether every layout has the loss that one GPU has."""
    alone, runs = one.result(one.runs[0]), layouts.runs
    if alone is None or alone.loss_final is None:
        return failed("same loss", f"one GPU alone: {one.why(one.runs[0])}", f"see {one.see(one.runs[0])}")
    wanted, allowed = alone.loss_final, TOLERANCE[one.runs[0].spec.kernel.precision]
    off: dict[str, float] = {}
    for run in runs:
        result = layouts.result(run)
        if result is None or result.status != Status.OK or result.loss_final is None:
            return failed("same loss", layouts.why(run), f"see {layouts.see(run)}")
        off[run.run_id] = abs(result.loss_final - wanted) / abs(wanted)
    worst = max(runs, key=lambda run: off[run.run_id])
    of = f"at step {alone.loss_step}: {wanted:.6f}; largest difference {off[worst.run_id]:.1g}, allowed {allowed:g}"
    wrong = [run for run in runs if off[run.run_id] > allowed]
    if not wrong:
        return passed("same loss", f"{len(runs)} layouts have the loss of one GPU {of}")
    told = f"{len(wrong)} of {len(runs)} layouts, such as {worst.layout.label()}, have not the loss of one GPU {of}"
    remedy = (
        f"a GPU or a link that computes wrongly, or a bug of torch: compare hosts in {layouts.see(worst)}"
    )
    return failed("same loss", told, remedy)


def judge_memory(outcome: Outcome) -> Check:
    """Whether a lack of memory is known as such, and confirmed."""
    run = outcome.runs[0]
    result, needs = outcome.result(run), run.prediction.peak_mem_bytes / 2**30
    if result and result.status == Status.OOM and result.confirmed:
        return passed("out of memory", f"{run.layout.label()}, predicted {needs:.0f} GiB: {result.reason}")
    told = outcome.why(run) + (", but not confirmed" if result and result.status == Status.OOM else "")
    remedy = f"GPUs have to be free, and of the memory that hardware= says; see {outcome.see(run)}"
    return failed("out of memory", f"predicted {needs:.0f} GiB: {told}", remedy)
