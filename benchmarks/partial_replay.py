"""GPU hours of searches that measure whole steps, or parts of steps first, on paper.

`python benchmarks/partial_steps.py ROWS.jsonl --paper` prints them. All searches pay what `measure=default` prices:
start, warm-up and measured steps, of which two where a layout is 1.3 times slower than the best so far. Then
contenders are measured again, by the rules of the program, until each that may still win has `measure.confirm` starts.
With parts, layouts that `measure.partial_steps=auto` slices give their time with an error drawn from those measured on
CPUs, others by few whole steps, and one start of a contender measures it in full. The winner is the best of these. A
cell whose parts whole steps contradict would be screened by whole steps; that is not simulated.
"""

import csv
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from statistics import median, quantiles

from replay import RACE_STEP_TIME_RATIO, RACED_STEPS, STARTUP_S, Replay, ReplayedRun, cells_of

from ultrabench.analysis.results.cases import Case, open_cases
from ultrabench.cli.tables import say, show, table, warn
from ultrabench.layout import Layout
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.result import Status
from ultrabench.run import RunSpec, Workload
from ultrabench.standing import Repeat, near_best, open_contenders, standings
from ultrabench.step_time import MIN_SAMPLES
from ultrabench.sweep.candidate import FEW_STEPS_COST, PARTS_COST, Candidate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.partial_steps import WholeSteps, auto_slice
from ultrabench.sweep.plan import Plan, make_plan, predictor
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.search import TriedRuns, beliefs_of, propose
from ultrabench.sweep.running.attempts import MAX_CONTENDERS

QUESTION = (
    "sweep=layouts", "sweep.nodes=[1,2,4,8,16]", "sweep.seq_len=8192", "sweep.gbs=512", "measure.partial_steps=auto",
)  # fmt: skip
"""Batches of 4,194,304 tokens on 1 to 16 nodes of 8 H100."""
MODELS, ASKED = ("llama3-8b", "llama3-70b", "mixtral-8x7b"), ("llama3-8b", "llama3-70b")
"""Models on paper, and those of the researcher's question."""
SIMULATED_CELLS, WINNER_SHARE, REGRET = 100, 0.95, 0.02
"""Cells that are drawn, and the bar: the share of them whose winner is within REGRET of their best layout."""
QUESTION_GPU_HOURS, STEP_SHARE = 600, 0.5
"""Bars: GPU hours of the question in all, and step hours in those of the adaptive search."""
WHOLE_NOISE = 0.01
"""Standard deviation of what starts of a run differ in."""
TURNS_NOISE = 0.005
"""Standard deviation of the time by the turns of one start, half the target of the interval of `measure=default`."""
STEP_NOISE = 0.01
"""Standard deviation of whole steps of one start, relative to their time. Published rows do not show it."""
FEW_NOISE = 1.25 * STEP_NOISE / math.sqrt(MIN_SAMPLES)
"""Standard deviation of the median of as few whole steps as have an interval: 1.25 times that of their mean."""
FEW_INTERVAL = 1.27 * STEP_NOISE
"""Half the expected distance between the extremes of six normal numbers, which is their interval."""
CONFIRMS = (3, 1)
"""Values of measure.confirm; the bars are about the first one, its default."""
DRAWS = 10
"""Draws of the cells of each model, of which the mean hours are printed."""
SEED = 61
BLOOM_SHAPE = {"hidden": "14336", "layers": "72", "num_gpus": "384", "gbs": "2048"}
"""The shape, GPUs and batch of the BLOOM cell: the shape of which most layouts were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun(ReplayedRun):
    """A run whose time by whole steps is known; `step_time_s` is what the search measures of it."""

    whole_s: float
    whole_noise: float = 0.0
    """Error of the first time by whole steps, relative to `whole_s`."""
    start_s: float
    measure: Measure
    kind: tuple[str, int] = ("none", 0)
    pair_share: float | None = None
    """Seconds of one turn of g1 and g2 in those of a whole step; None where whole steps are measured."""
    third_share: float = 0.0
    """The same for the third size, which the first run of a kind measures, too."""
    few: bool = False
    """Whether few whole steps are measured."""
    few_noise: float = 0.0
    """Error of the first time by few whole steps, relative to `whole_s`."""
    part_ci95_rel: float = 2 * TURNS_NOISE
    """Half the 95 % interval of the time by parts, relative to it."""

    @property
    def is_partial(self) -> bool:
        """Whether parts of steps are measured."""
        return self.pair_share is not None

    def steps_s(self, best_s: float = math.inf, *, has_third: bool = False) -> float:
        """Seconds of the steps of one measurement, when the best step time before it was `best_s`."""
        if self.step_time_s is None:
            return 0.0
        measure = self.measure.few_steps if self.few else self.measure
        share = 1.0 if self.pair_share is None else self.pair_share + self.third_share * has_third
        turn_s = share * self.whole_s
        if self.step_time_s > RACE_STEP_TIME_RATIO * best_s:
            return max(measure.warmup_steps * turn_s, measure.warmup_s) + RACED_STEPS * turn_s
        return measure.priced_s(turn_s)

    def cost_gpu_s(self, best_s: float = math.inf) -> float:
        """GPU seconds of the run without a third size."""
        return (self.start_s + self.steps_s(best_s)) * self.layout.world_size

    def whole(self) -> "SimulatedRun":
        """The run measured by whole steps."""
        step_time_s = None if self.step_time_s is None else self.whole_s * (1 + self.whole_noise)
        return replace(self, pair_share=None, step_time_s=step_time_s, search_cost=1.0)

    def screened(self) -> "SimulatedRun":
        """The run measured by parts, or by few whole steps where no part stands for it."""
        if self.is_partial or self.step_time_s is None:
            return self
        step_time_s = self.whole_s * (1 + self.few_noise)
        return replace(self, few=True, step_time_s=step_time_s, search_cost=FEW_STEPS_COST)

    def confirming_s(self) -> float:
        """Seconds of the steps of the start that confirms a screened run: few whole steps and parts, or all steps."""
        if self.few:
            return self.measure.priced_s(self.whole_s)
        return self.measure.priced_beside_parts_s(self.whole_s, (self.pair_share or 0.0) * self.whole_s)


@dataclass(slots=True)
class Bill:
    """GPU hours of a search."""

    start_h: float = 0.0
    step_h: float = 0.0
    confirm_step_h: float = 0.0
    confirm_start_h: float = 0.0
    runs: int = 0
    regrets: list[float] = field(default_factory=list)

    def add(self, other: "Bill") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def all_step_h(self) -> float:
        return self.step_h + self.confirm_step_h

    @property
    def all_start_h(self) -> float:
        return self.start_h + self.confirm_start_h

    @property
    def all_h(self) -> float:
        return self.all_step_h + self.all_start_h

    @property
    def near(self) -> int:
        return sum(regret <= REGRET for regret in self.regrets)


def search(
    runs: Sequence[SimulatedRun], strategy: str, confirm: int, max_p_oom: float, draw: random.Random
) -> Bill:
    """What a search of a cell costs, and what it misses.

    Args:
        strategy: exhaustive, adaptive or partial; the first two measure whole steps.
        confirm: number of measurements of each contender.
    """
    runs = [run.screened() if strategy == "partial" else run.whole() for run in runs]
    cell, bill, kinds = Replay(runs, max_p_oom), Bill(), set[tuple[str, int]]()

    def make(run: SimulatedRun) -> None:
        has_third = run.is_partial and run.kind not in kinds and run.step_time_s is not None
        if has_third:
            kinds.add(run.kind)
        bill.step_h += run.steps_s(cell.best_s, has_third=has_third) * run.layout.world_size / 3600
        bill.start_h += run.start_s * run.layout.world_size / 3600
        bill.runs += 1
        cell.make([run])

    if strategy == "exhaustive":
        for run in sorted(runs, key=lambda run: run.prediction.step_time_s):
            if cell.may_fit(run):
                make(run)
    else:
        while proposed := propose(runs, cell.tried()):
            make(proposed[0])
    timed_runs = [run for run in cell.runs_made if run.step_time_s]
    winner = confirmed_winner(timed_runs, confirm, bill, draw)
    best_s = min((run.whole_s for run in runs if run.step_time_s), default=math.inf)
    bill.regrets.append(winner.whole_s / best_s - 1 if winner else math.inf)
    return bill


def confirmed_winner(
    runs: Sequence[SimulatedRun], confirm: int, bill: Bill, draw: random.Random
) -> SimulatedRun | None:
    """The best of the measured runs, after the further starts of contenders, which are added to the bill."""
    run_by_id = {run.run_id: run for run in runs}
    repeats_by_id = {run.run_id: [_repeat(run, run.step_time_s or 0.0)] for run in runs}
    while True:
        ranking = standings(chain.from_iterable(repeats_by_id.values())).get(CELL, [])
        starts = list[tuple[SimulatedRun, bool]]()
        for contender in open_contenders(near_best(ranking, MAX_CONTENDERS)):
            run, num_starts = run_by_id[contender.run_id], len(repeats_by_id[contender.run_id])
            starts += [(run, contender.screened)] * (1 if contender.screened else confirm - num_starts)
        if not starts:
            return run_by_id[ranking[0].run_id] if ranking and ranking[0].best else None
        for run, is_confirming in starts:
            seconds = run.confirming_s() if is_confirming else run.steps_s()
            bill.confirm_step_h += seconds * run.layout.world_size / 3600
            bill.confirm_start_h += run.start_s * run.layout.world_size / 3600
            whole_s = run.whole_s * math.exp(draw.gauss(0, WHOLE_NOISE))
            if run.is_partial:
                parts_s = (
                    (run.step_time_s or 0.0) / run.whole_s * whole_s * math.exp(draw.gauss(0, TURNS_NOISE))
                )
                repeat = _repeat(run.whole(), whole_s, parts_s) if is_confirming else _repeat(run, parts_s)
            elif run.few and not is_confirming:
                repeat = _repeat(run, whole_s * math.exp(draw.gauss(0, FEW_NOISE)))
            else:
                repeat = _repeat(replace(run, few=False), whole_s)
            repeats_by_id[run.run_id].append(repeat)


CELL = "cell"


def _repeat(run: SimulatedRun, step_time_s: float, parts_s: float | None = None) -> Repeat:
    """A measurement of a run; `parts_s` is its time by parts in a start with whole steps."""
    return Repeat(
        run_id=run.run_id, cell=CELL, status=Status.OK, rate=1 / step_time_s,
        ci95_rel=FEW_INTERVAL if run.few else run.part_ci95_rel if run.is_partial else 2 * TURNS_NOISE,
        partial=run.is_partial, screened=run.is_partial or run.few, parts_ci95_rel=run.part_ci95_rel,
        parts_ratio=None if parts_s is None else parts_s / step_time_s,
    )  # fmt: skip


def simulated(
    runs: Sequence[Candidate], measure: Measure, errors: Sequence[float], draw: random.Random
) -> list[SimulatedRun]:
    """The candidates of a cell with step times drawn around the predicted ones, as the search expects them.

    Errors of predictions are those of the Gaussian process of the search, one after the other; whether a layout fits
    follows its P(OOM).
    """
    beliefs, simulated_runs = beliefs_of(runs, TriedRuns()), list[SimulatedRun]()
    for index, run in enumerate(runs):
        log_error = draw.gauss(float(beliefs.means[index]), math.sqrt(float(beliefs.variances[index])))
        beliefs.learn(index, log_error)
        whole_s = run.prediction.step_time_s * math.exp(log_error)
        oom = draw.random() < run.prediction.p_oom
        priced_s = run.priced_s(measure, run.prediction.step_time_s) if run.fits else 0.0
        slice_, pair_share, third_share = run.slice, None, 0.0
        whole_noise = draw.gauss(0, WHOLE_NOISE)
        few_noise = whole_noise + draw.gauss(0, FEW_NOISE)
        error = draw.choice(errors) if slice_ else whole_noise
        if slice_:
            pair_share = run.turn_share * (slice_.g1 + slice_.g2) / sum(slice_.sizes)
            third_share = run.turn_share - pair_share
        simulated_runs.append(
            SimulatedRun(
                run_id=run.run_id, layout=run.layout, prediction=run.prediction, oom=oom, whole_s=whole_s,
                whole_noise=whole_noise, few_noise=few_noise, search_cost=run.search_cost,
                step_time_s=None if oom else whole_s * max(0.05, 1 + error), measure=measure,
                start_s=run.prediction.duration_s - priced_s, kind=run.spec.linearity_kind,
                pair_share=pair_share, third_share=third_share, part_ci95_rel=part_interval(errors),
            )
        )  # fmt: skip
    return simulated_runs


def replayed(
    case: Case,
    run: ReplayedRun,
    profile: Profile,
    measure: Measure,
    errors: Sequence[float],
    draw: random.Random,
) -> SimulatedRun:
    """A measured run of a table, whose parts have the predicted share of a step and one of these errors."""
    error, few_noise = draw.choice(errors), _few_noise(draw)
    shares = shares_of(run.layout, lambda gas: _case_s(case, profile, gas))
    whole_s = run.step_time_s or run.prediction.step_time_s
    step_time_s = None if run.step_time_s is None else whole_s * max(0.05, 1 + error * (shares is not None))
    pair_share, third_share = shares or (None, 0.0)
    return SimulatedRun(
        run_id=run.run_id, layout=run.layout, prediction=run.prediction, oom=run.oom, whole_s=whole_s,
        step_time_s=step_time_s, measure=measure, start_s=STARTUP_S, kind=case.run.spec.linearity_kind,
        few_noise=few_noise,
        search_cost=PARTS_COST if shares else 1.0,
        pair_share=pair_share, third_share=third_share, part_ci95_rel=part_interval(errors),
    )  # fmt: skip


def part_interval(errors: Sequence[float]) -> float:
    """Half the interval that holds 95 % of the errors of parts, as their own intervals do."""
    return max(2 * TURNS_NOISE, quantiles(map(abs, errors), n=20, method="inclusive")[-1])


def _few_noise(draw: random.Random) -> float:
    """Error of the time by few whole steps of one start, relative to a published time."""
    return draw.gauss(0, math.hypot(WHOLE_NOISE, FEW_NOISE))


def shares_of(layout: Layout, seconds_of: Callable[[int], float]) -> tuple[float, float] | None:
    """The share of g1 and g2 in a whole step, and that of the third size; None where whole steps are measured."""
    slice_ = auto_slice(layout)
    if isinstance(slice_, WholeSteps):
        return None
    whole_s, sizes_s = seconds_of(layout.gas), [seconds_of(size) for size in slice_.sizes]
    return sum(sizes_s[:2]) / whole_s, sum(sizes_s[2:]) / whole_s


def _case_s(case: Case, profile: Profile, gas: int) -> float:
    spec = case.run.spec.with_gas(gas)
    part = replace(case, run=replace(case.run, spec=spec), divided=profile.as_divided(spec))
    return part.predict_s(profile.time, profile.flags)


def playbook_cells(
    path: Path, measure: Measure, errors: Sequence[float], draw: random.Random
) -> Iterator[list[SimulatedRun]]:
    """The cells of a table of `ultrabench import`, replayed as if its programs could measure parts."""
    cases, profile = open_cases([str(path)], None, Path("results"), say, warn)
    case_by_id = {case.run.spec.run_id: case for case in cases}
    for runs in cells_of(cases, profile).values():
        yield [replayed(case_by_id[r.run_id], r, profile, measure, errors, draw) for r in runs]


def bloom_cell(
    path: Path, measure: Measure, errors: Sequence[float], draw: random.Random
) -> list[SimulatedRun]:
    """The published layouts of one candidate of BLOOM; a layout that was measured several times has the median."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if "BLOOM" in row["model"] and row["status"] == "ok"]
    rows = [row for row in rows if all(row[name] == value for name, value in BLOOM_SHAPE.items())]
    times_by_layout = defaultdict[Layout, list[float]](list)
    for row in rows:
        dp, tp, pp, mbs = (int(row[name]) for name in ("dp", "tp", "pp", "mbs"))
        layout = Layout(
            dp=dp, tp=tp, pp=pp, mbs=mbs, gas=int(row["gbs"]) // (dp * mbs), zero_stage=int(row["zero"]),
            pp_schedule="1f1b", recompute=row["recompute"],
        )  # fmt: skip
        times_by_layout[layout].append(float(row["step_time_s"]))
    config = load_config(["hardware=a100-80x8", "model=8B", "profile=megatron", "measure=default"])
    shape = ModelShape(
        # A gated feed-forward of two thirds the width has the parameters of theirs, which is not gated.
        name="bloom", hidden_size=14336, num_hidden_layers=72, num_attention_heads=64, num_key_value_heads=64,
        intermediate_size=57344 * 2 // 3 // 16 * 16, vocab_size=250_880, tie_word_embeddings=True,
    )  # fmt: skip
    nodes = int(BLOOM_SHAPE["num_gpus"]) // config.hardware.gpus_per_node
    cell_predictor = predictor(config, nodes, config.hardware.peak("bf16", nodes, None, 1))
    runs = list[SimulatedRun]()
    for layout, times_s in times_by_layout.items():
        spec = RunSpec(
            shape=shape, workload=Workload(seq_len=2048, gbs=layout.gbs), layout=layout, kernel=config.kernel,
            nodes=nodes, gpus_per_node=config.hardware.gpus_per_node,
        )  # fmt: skip
        prediction = cell_predictor.predict(spec)
        shares = shares_of(
            layout, lambda gas, spec=spec: cell_predictor.predict(spec.with_gas(gas)).step_time_s
        )
        error = draw.choice(errors) if shares else 0.0
        pair_share, third_share = shares or (None, 0.0)
        runs.append(
            SimulatedRun(
                run_id=spec.run_id, layout=layout, prediction=replace(prediction, p_oom=min(0.1, prediction.p_oom)),
                oom=False, whole_s=median(times_s), step_time_s=median(times_s) * max(0.05, 1 + error),
                measure=measure, start_s=STARTUP_S, kind=spec.linearity_kind,
                few_noise=_few_noise(draw),
                search_cost=PARTS_COST if shares else 1.0, pair_share=pair_share, third_share=third_share,
                part_ci95_rel=part_interval(errors),
            )
        )  # fmt: skip
    return runs


def compare(
    title: str, cells: Sequence[Sequence[SimulatedRun]], max_p_oom: float, draw: random.Random, draws: int = 1
) -> Bill:
    """Prints the hours of each strategy, divided by `draws`; returns the bill of parts with the usual confirmation."""
    bills, rows = dict[tuple[str, int], Bill](), list[tuple[str, ...]]()
    for name, confirm in product(("exhaustive", "adaptive", "partial"), CONFIRMS):
        bill = bills[name, confirm] = Bill()
        for runs in cells:
            bill.add(search(runs, name, confirm, max_p_oom, draw))
        hours = (bill.step_h, bill.all_step_h, bill.all_start_h, bill.all_h)
        hours_texts = (f"{value / draws:,.0f}" for value in hours)
        regret_texts = f"{bill.near}/{len(bill.regrets)}", f"{max(bill.regrets):.1%}"
        rows.append((name, str(confirm), f"{bill.runs / draws:.0f}", *hours_texts, *regret_texts))
    headings = (
        ">confirm",
        ">runs",
        ">steps h",
        ">and confirmed",
        ">starts h",
        ">in all",
        ">within 2 %",
        ">worst",
    )
    show(table(title, "strategy", *headings, rows=rows), "")
    for confirm in CONFIRMS:
        partial, adaptive = bills["partial", confirm], bills["adaptive", confirm]
        before, share = partial.step_h / adaptive.step_h, partial.all_step_h / adaptive.all_step_h
        shares_text = f"{before:.0%} before confirmation, {share:.0%} with it"
        text = f"step hours in those of adaptive, confirm={confirm}: {shares_text}"
        say_verdict(text, f"{STEP_SHARE:.0%}", share <= STEP_SHARE)
    return bills["partial", CONFIRMS[0]]


def say_verdict(text: str, bar_text: str, is_met: bool) -> None:
    print(f"{text}; bar {bar_text} {'ok' if is_met else 'MISSED'}")


def drawn_cells(
    plan: Plan, models: Sequence[str], errors: Sequence[float], draws: int, draw: random.Random
) -> list[list[SimulatedRun]]:
    """The cells of these models, `draws` times, each time with other step times."""
    cells = [runs for runs in plan.cells.values() if runs[0].spec.shape.name in models]
    return [simulated(runs, plan.config.measure, errors, draw) for _ in range(draws) for runs in cells]


def print_paper(errors: Sequence[float], playbook: Path | None, bloom: Path | None) -> None:
    """Prints the hours of each question with these errors of parts, and the verdicts on the bars."""
    draw, plan = (
        random.Random(SEED),
        make_plan(load_config([*QUESTION, f"sweep.models=[{','.join(MODELS)}]"])),
    )
    measure, max_p_oom = plan.config.measure, plan.config.max_p_oom
    for models in (ASKED, *((model,) for model in MODELS)):
        cells = drawn_cells(plan, models, errors, DRAWS, draw)
        title = f"{', '.join(models)}: {len(cells) // DRAWS} cells, mean of {DRAWS} draws"
        bill = compare(title, cells, max_p_oom, draw, DRAWS)
        if models == ASKED:
            hours = bill.all_h / DRAWS
            text = f"GPU hours of the researcher's question in all: {hours:,.0f}"
            say_verdict(text, str(QUESTION_GPU_HOURS), hours <= QUESTION_GPU_HOURS)
    cells = drawn_cells(plan, MODELS, errors, DRAWS, draw)
    cells = [runs for runs in cells if any(run.step_time_s for run in runs)][:SIMULATED_CELLS]
    bill = compare(f"{len(cells)} simulated cells", cells, max_p_oom, draw)
    share = bill.near / len(cells)
    say_verdict(f"winners within {REGRET:.0%}: {share:.0%}", f"{WINNER_SHARE:.0%}", share >= WINNER_SHARE)
    if playbook:
        cells = [runs for _ in range(DRAWS) for runs in playbook_cells(playbook, measure, errors, draw)]
        compare(f"playbook, mean of {DRAWS} draws of errors", cells, max_p_oom, draw, DRAWS)
    if bloom:
        draws = [bloom_cell(bloom, measure, errors, draw) for _ in range(DRAWS)]
        compare(f"BLOOM, mean of {DRAWS} draws of errors", draws, max_p_oom, draw, DRAWS)
