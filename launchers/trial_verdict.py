"""Whether the trials of an acceptance run went as they have to, each failure with its remedy."""

from ultrabench.launchers.check import Check, failed, passed
from ultrabench.launchers.trial import Outcome
from ultrabench.result import Status
from ultrabench.sweep.losses import TOLERANCE
from ultrabench.sweep.plan import Candidate


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


def judge_stop(outcome: Outcome, rank: int) -> Check:
    """Whether the verdict on a frozen rank names it, and the next run measured on the cleaned nodes."""
    frozen, after = outcome.runs
    attempt, following = outcome.attempt(frozen), outcome.attempt(after)
    result = attempt.result if attempt else None
    if result is None or result.status != Status.HANG:
        told = f"a run with a stopped rank is no hang: {outcome.why(frozen)}"
        return failed("stopped rank", told, f"see {outcome.see(frozen)}")
    said = str(result.reason)
    if not said.startswith(f"rank {rank} on ") or "is stopped" not in said:
        remedy = f"agents have to be able to read /proc of their ranks; see {outcome.see(frozen)}"
        return failed("stopped rank", f"rank {rank} was stopped, the verdict is: {said}", remedy)
    same = attempt and following and attempt.allocation == following.allocation
    if not same or not following or not following.result or following.result.status != Status.OK:
        remedy = f"processes have to go when their agent kills them; see {outcome.see(after)}"
        return failed("stopped rank", f"the run after it did not measure: {outcome.why(after)}", remedy)
    return passed("stopped rank", f"{said}; the next run measured on the same nodes")


def judge_memory(outcome: Outcome) -> Check:
    """Whether a lack of memory is known as such, and confirmed."""
    run = outcome.runs[0]
    result, needs = outcome.result(run), run.prediction.peak_mem_bytes / 2**30
    if result and result.status == Status.OOM and result.confirmed:
        return passed("out of memory", f"{run.layout.label()}, predicted {needs:.0f} GiB: {result.reason}")
    told = outcome.why(run) + (", but not confirmed" if result and result.status == Status.OOM else "")
    remedy = f"GPUs have to be free, and of the memory that hardware= says; see {outcome.see(run)}"
    return failed("out of memory", f"predicted {needs:.0f} GiB: {told}", remedy)


def judge_cancel(outcome: Outcome) -> Check:
    """Whether runs that had finished before a cancel stayed, and the others were made again."""
    before, under_way, _ = outcome.runs
    for run in outcome.runs:
        result = outcome.result(run)
        if result is None or result.status != Status.OK:
            return failed("cancelled job", outcome.why(run), f"see {outcome.see(run)}")
    first, again = outcome.attempt(under_way), outcome.attempt(under_way, 1)
    if outcome.attempt(before, 1) or not again or not first or not first.result:
        told = f"{_attempts(outcome, before)} attempts of the run that had finished, "
        told += f"{_attempts(outcome, under_way)} of the one under way; expected 1 and 2"
        return failed("cancelled job", told, f"see {outcome.see(under_way)}")
    ended = f"{first.result.status.value}, {first.result.reason}"
    return passed(
        "cancelled job", f"the run under way ended as {ended}, and ran again; what had finished did not"
    )


def _attempts(outcome: Outcome, run: Candidate) -> int:
    return len(outcome.state.attempts_of(run.run_id))
