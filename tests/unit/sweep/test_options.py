"""Options beside layouts: they are read, planned, named in run ids, priced, searched and extended."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from tests.configs import refused
from tests.sweep_folder import ended
from tests.unit import allocations
from tests.unit.sweep.test_adaptive import state_of
from ultrabench.agent.lead import may_fit
from ultrabench.agent.ranks.node import with_variant_env
from ultrabench.launchers.allocate import array_groups
from ultrabench.launchers.open_sweep import (
    require_same,
    require_same_batches,
    require_same_flags,
    sweep_json_of,
)
from ultrabench.launchers.required_programs import require_program
from ultrabench.launchers.slurm.script import array_script
from ultrabench.record import raw_json
from ultrabench.result import Status
from ultrabench.run import AttemptKey, env_id, fill_in
from ultrabench.store.events import Launched
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import plan_table, rows_of, runs_of
from ultrabench.sweep.remedy import same_commands
from ultrabench.sweep.running.attempts import dominator_by_run, next_attempts, unpromising_reasons
from ultrabench.sweep.running.outliers import loss_groups
from ultrabench.sweep.running.price import PlannedJob, control_key, controls, pack, planned_jobs
from ultrabench.sweep.running.standings import best_of_cells

PROGRAM = ("kernel=command", 'kernel.command=[train,"--tp={tp}","--etp={etp}"]', "launcher=slurm")
SMALL = ("model=tiny", "sweep.nodes=[1]", "sweep.gbs=8", "sweep.tp=[1,2]", "sweep.pp=[1]", "sweep.mbs=[1]",
         "sweep.zero_stage=[0]", "sweep.gas=null", "hardware=cpu", "name=t")  # fmt: skip
ENV = "+sweep.env={ALGO: [null, Ring]}"
FLAGS = '+sweep.flags={overlap: {off: [], on: ["--overlap"]}}'
KNOBS = (
    "kernel.knobs={graph: what is captured, recipe: which numbers share a scale, parts: parts of the loss}",
    'kernel.flags={graph: {none: [], full: ["--graph=full"]}, recipe: {delayed: [], rowwise: []}, '
    'parts: {1: [], 2: ["--parts={parts}"], 4: ["--parts={parts}"]}, '
    'precision: {bf16: [], fp8: ["--recipe={recipe}"]}}',
    "kernel.knob_values={parts: 2}",
)
KNOB_PROGRAM = (
    "kernel=command", "kernel.command=[train]", "kernel.precision=bf16", "launcher=slurm", "sweep.tp=[1]"
)  # fmt: skip
WORDS = ("+sweep.words={etp: [1, 2]}", "+sweep.rules=['etp divides dp']")


def plan(*words, program=PROGRAM):
    value_by_key = dict(override.split("=", 1) for override in (*SMALL, *program, *words))
    return make_plan(load_config([f"{key}={value}" for key, value in value_by_key.items()]))


ALL = plan(ENV, FLAGS, *WORDS, "sweep.seq_len=[32,64]")


def test_every_combination_is_a_candidate_and_rules_reject_with_the_reason():
    # Two GPUs: tp=1 has dp=2, which both values of ep divide; tp=2 has dp=1.
    assert len(ALL.candidates) == 2 * 2 * 2 * 2 * 2
    rejected = [c for c in ALL.candidates if c.rule == "word_rule"]
    assert len(rejected) == 2 * 2 * 2
    assert {c.reason for c in rejected} == {"etp=2 does not divide dp=1 (etp divides dp)"}
    assert len({c.run_id for c in ALL.candidates}) == len(ALL.candidates)
    assert {tuple(cell)[2:] for cell in ALL.cells} == {(32, 8, "fp32"), (64, 8, "fp32")}
    summary = ALL.summary()
    assert (summary["seq_len"], summary["options"]["env.ALGO"]) == ([32, 64], [None, "Ring"])


def test_an_unset_variable_leaves_run_ids_as_they_were_and_another_value_does_not():
    plain = {c.run_id for c in plan(*WORDS).runs}
    varied = plan(ENV, *WORDS).runs
    assert plain < {c.run_id for c in varied}
    assert plain == {c.run_id for c in varied if c.spec.variant["env.ALGO"] is None}
    listed = plan("kernel.compile=[false,true]", "kernel.attention=[auto,math]", program=()).runs
    alone = plan("kernel.compile=true", "kernel.attention=math", program=()).runs
    assert {c.run_id for c in alone} < {c.run_id for c in listed}


def test_commands_and_variables_are_those_of_the_variant():
    run = next(c for c in ALL.runs if {*c.spec.variant.values()} == {"Ring", "on", 2})
    words = fill_in(run.spec, AttemptKey(run.run_id, 0, 0), ALL.config.measure)
    assert words == ["train", f"--tp={run.layout.tp}", "--etp=2", "--overlap"]
    assert run.spec.label().endswith(" ALGO=Ring overlap=on etp=2")
    assert with_variant_env({"ALGO": "Tree", "A": "1"}, {"ALGO": None}) == {"A": "1"}
    facts = {"variables": {"ALGO": "Ring", "B": "2"}}
    varied = env_id(facts, run.spec.kernel, "d", {"ALGO"})
    assert varied == env_id({"variables": {"B": "2"}}, run.spec.kernel, "d")


def test_runs_are_read_again_from_the_table_of_the_plan():
    sweep = sweep_json_of(ALL.config, {"core_flops_per_s": 1e9, "cores": 2})
    state = SweepState(launched=Launched(generation=1, config=ALL.config.resolved))
    read_back = [*runs_of(sweep, rows_of(plan_table(ALL.candidates)), state)]
    assert [(r.spec.run_id, r.run_id, r.cell, r.spec.variant) for r in read_back] == [
        (r.run_id, r.run_id, r.cell, r.spec.variant) for r in ALL.runs
    ]
    old = plan_table(plan(*WORDS).candidates).drop_columns(["precision", "variant"])
    assert config_from_tree(ALL.config.resolved).options == ALL.config.options
    assert "variant" not in old.column_names


def test_control_runs_have_the_first_variant_and_share_the_allocations_of_others():
    for key, control in controls(ALL).items():
        assert control.spec.variant == {"env.ALGO": None, "flags.overlap": "off", "words.etp": 1}
        assert control_key(control) == key
    groups = pack(next_attempts(ALL, SweepState()).todo, ALL.config, controls(ALL))
    cells = [{todo.candidate.cell for todo in group} for group in groups]
    assert sorted(map(sorted, cells)) == sorted([cell] for cell in ALL.cells)
    (job,) = planned_jobs(ALL, next_attempts(ALL, SweepState()), SweepState())
    assert job.attempts[0].key.run_id == job.control


def test_places_have_allocations_of_their_own_whose_agents_run_there():
    places = plan(
        "+sweep.container=[a.sqsh,b.sqsh]", 'launcher.srun=["--container-image={container}"]',
        "+sweep.python=[/a/python]",
        *WORDS,
    )  # fmt: skip
    groups = pack(next_attempts(places, SweepState()).todo, places.config, controls(places))
    assert [sorted({t.candidate.runtime for t in group}) for group in groups] == [
        [("a.sqsh", "/a/python")], [("b.sqsh", "/a/python")],
    ]  # fmt: skip
    jobs = [
        PlannedJob(attempts=tuple(group), control=None, limit_s=60.0, gpu_hours=1.0, interval=(1.0, 1.0))
        for group in groups
    ]
    assert len(array_groups(jobs, 100)) == 2
    assert len({control.run_id for control in controls(places).values()}) == 2
    first = allocations.first_allocations(allocations.open_sweep("unused"))[0]
    task = replace(first.tasks[0], spec=places.runs[0].spec)
    script = array_script([replace(first, tasks=(task,))], places.config)
    assert f"--container-image={places.runs[0].spec.variant['container']}" in script
    assert "/a/python -P -m ultrabench.agent" in script


def test_a_lack_of_memory_and_losses_speak_for_one_variant_only():
    small = plan(ENV, *WORDS, "sweep.mbs=[1,2]")
    runs = [allocations.predicted(run, memory_share=2.0) for run in small.runs]
    by_label = {c.spec.label(): c for c in runs}
    unset, ring = (
        by_label[f"dp1 tp2 pp1 z0 mbs{mbs} gas{8 // mbs} ALGO={algo} etp=1"]
        for mbs, algo in ((1, "unset"), (2, "Ring"))
    )
    larger = by_label["dp1 tp2 pp1 z0 mbs2 gas4 ALGO=unset etp=1"]
    oom = ended(Status.OOM, confirmed=True)
    key = AttemptKey(unset.run_id, 0, 0)
    state = SweepState(attempts={key: AttemptState(key=key, result=oom)})
    assert dominator_by_run(runs, state) == {larger.run_id: unset.run_id}
    any_task = allocations.first_allocations(allocations.open_sweep("unused"))[0].tasks[0]
    task, others = (replace(any_task, spec=run.spec) for run in (unset, ring))
    assert may_fit(others, [(task, oom)])
    assert not may_fit(replace(others, spec=larger.spec), [(task, oom)])


def test_a_sweep_gets_more_values_but_no_other_ones(tmp_path):
    begun = plan(FLAGS, *WORDS).config
    described = sweep_json_of(begun, {"core_flops_per_s": 1e9, "cores": 2})
    longer = ("sweep.seq_len=[32,64,128]", "sweep.gbs=[8,16]", "kernel.precision=[fp32,bf16]")
    require_same(described, plan(FLAGS, *WORDS, "sweep.seq_len=[64,128]", *longer[1:]).config, tmp_path)
    with refused("a different workload (workload.seq_len: 64 -> 128)"):
        require_same(described, plan(FLAGS, *WORDS, "sweep.seq_len=[128,256]").config, tmp_path)
    state = SweepState(launched=Launched(generation=1, config=begun.resolved))
    require_same_flags(state, plan(FLAGS.replace("}}", ', more: ["-x"]}}'), *WORDS).config)
    with refused("sweep.flags.overlap.on: ['--overlap'] -> ['--other'] in a sweep that was launched before"):
        require_same_flags(state, plan(FLAGS.replace("--overlap", "--other"), *WORDS).config)


WEAK = ("sweep.nodes=[2,4]", "sweep.gbs=[8,16]", "sweep.scaling=weak")


def test_weak_scaling_gives_each_number_of_nodes_a_batch_in_proportion():
    weak = plan(*WEAK, program=())
    assert {(cell.nodes, cell.gbs) for cell in weak.cells} == {(2, 8), (2, 16), (4, 16), (4, 32)}
    alone = plan("sweep.nodes=[4]", "sweep.gbs=32", program=())
    assert {run.run_id for run in alone.runs} < {run.run_id for run in weak.runs}
    strong, usual = (plan(*WEAK[:2], *words, program=()) for words in (["sweep.scaling=strong"], []))
    assert {run.run_id for run in strong.runs} == {run.run_id for run in usual.runs}
    assert {(cell.nodes, cell.gbs) for cell in usual.cells} == {(2, 8), (2, 16), (4, 8), (4, 16)}
    assert (weak.summary()["scaling"], usual.summary()["scaling"]) == ("weak", "strong")
    assert config_from_tree(weak.config.resolved).scaling == "weak"
    with refused("sweep.scaling=weak with gbs=9 on 2 nodes gives gbs=13.5 on 3 nodes; use a multiple of 2"):
        plan("sweep.nodes=[3,2]", "sweep.gbs=9", "sweep.scaling=weak", program=())


def test_a_value_without_candidates_lacks_them_in_all_batches_of_weak_scaling():
    # 4 and 8 GPUs with tp=1: dp*mbs is 4*4 and 8*4, of which only gbs=32 on 4 nodes is a multiple.
    weak = plan(*WEAK, "sweep.tp=[1,3]", "sweep.mbs=[1,4,16]", program=())
    reasons = {(lost["axis"], lost["value"]): lost["reason"] for lost in weak.summary()["without_candidates"]}
    assert reasons == {
        ("tp", 3): "8 GPUs are not divisible by tp=3",
        ("mbs", 16): "gbs=32 is not divisible by dp*mbs with dp=8, mbs=16 (gbs=128 is)",
    }
    odd = plan("sweep.nodes=[2,3]", "sweep.scaling=weak", "sweep.tp=[4]", program=())
    assert odd.summary()["without_candidates"] == [
        {"axis": "nodes", "value": 3, "reason": "6 GPUs are not divisible by tp=4"}
    ]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (("sweep.nodes=[2,4]", "sweep.gbs=8"), None), (("sweep.nodes=[4,8]", "sweep.gbs=16"), None),
        (("sweep.nodes=[1,2,4]", "sweep.gbs=4"), None),
        (("sweep.nodes=[1,2,4]", "sweep.gbs=8"), "(workload.gbs on 2 nodes: 8 -> 16); use sweep.gbs=4, that of 1 node"),
        (("sweep.nodes=[2,4]", "sweep.gbs=8", "sweep.scaling=strong"),
            "(workload.gbs on 4 nodes: 16 -> 8); start a new"),
    ],
)  # fmt: skip
def test_a_launch_keeps_the_batch_of_each_number_of_nodes(words, change, tmp_path):
    begun = plan("sweep.nodes=[2,4]", "sweep.scaling=weak", program=()).config
    later = plan("sweep.scaling=weak", *words, program=()).config
    described = sweep_json_of(begun, {"core_flops_per_s": 1e9, "cores": 2})
    for difference in (partial(require_same, described), partial(require_same_batches, begun.resolved)):
        with refused(change) if change else nullcontext():
            difference(later, tmp_path)


def test_the_search_tries_layouts_first_and_then_other_options_on_the_best_few():
    words = ("sweep=playbook", "sweep.models=[8B]", "measure.confirm=1", "profile=nanotron", "sweep.nodes=[8]",
             "+sweep.env={ALGO: [null, Ring, Tree], LL: [null, '1']}", "launcher=local")  # fmt: skip
    program = ("kernel=command", "kernel.command=[train]")
    searched = make_plan(load_config([*words, *program, "sweep.strategy=adaptive", "sweep.batch=3"]))
    attempts, speeds = [], {"Ring": 0.9, "Tree": 1.1, "1": 0.95}

    def state():
        now = state_of(attempts, searched)
        for todo in attempts:
            result = now.attempts[todo.key].result
            factor = 1.0
            for value in todo.candidate.spec.variant.values():
                factor *= speeds.get(value, 1.0)
            times = tuple(factor * time_s for time_s in result.step_times_s)
            now.attempts[todo.key] = AttemptState(key=todo.key, result=replace(result, step_times_s=times))
        return now

    while todo := next_attempts(searched, state()).todo:
        attempts += todo
        assert len(attempts) < 80, "the search does not end"
    variants = [tuple(t.candidate.spec.variant.values()) for t in attempts]
    first = variants.index(next(v for v in variants if any(v)))
    assert not any(any(v) for v in variants[:first])
    others = variants[first:]
    assert others.count(("Ring", None)) == others.count(("Tree", None)) == others.count((None, "1")) == 3
    assert {v for v in others if all(v)} == {("Ring", "1")}, "only what was faster alone is tried together"
    best = best_of_cells(searched.runs, state(), "cuda")
    (standing,) = best.values()
    winner = next(run for run in searched.runs if run.run_id == standing.run_id)
    assert tuple(winner.spec.variant.values()) == ("Ring", "1")
    tried = {t.key.run_id for t in attempts}
    assert {run.run_id for run in searched.runs} == tried | unpromising_reasons(searched.runs, state()).keys()


def test_losses_of_different_programs_are_not_compared():
    runs = [run for run in ALL.runs if run.spec.workload.seq_len == 32]
    state = SweepState()
    for run in runs:
        key, loss = AttemptKey(run.run_id, 0, 0), 3.0 if run.spec.variant["flags.overlap"] == "on" else 2.0
        result = ended(step_times_s=(0.1,) * 6, loss_final=loss)
        spec = {"shape": {}, "workload": {}, "kernel": {"name": "k", "kind": "command", "precision": "fp32"}}
        state.attempts[key] = AttemptState(
            key=key, result=result, spec_json=raw_json(spec | {"variant": run.spec.variant})
        )
    assert all(len(groups) == 1 for groups in loss_groups(state))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["+sweep.env={HF_TOKEN: [a]}"], "sweep.env.HF_TOKEN looks like a secret"),
        (["+sweep.env={OMP_NUM_THREADS: [1, 2]}"], "ultrabench sets OMP_NUM_THREADS for each rank"),
        (["+sweep.env={A: []}"], "sweep.env.A is empty; list at least one value"),
        (["+sweep.env={A: [[1]]}"], "sweep.env.A=[1]"),
        (["+sweep.env=[A]"], "sweep.env=['A'] is not a mapping; write one, such as {NCCL_ALGO: [null, Ring]}"),
        (["sweep.rule=[a]"], "unknown override 'sweep.rule'; did you mean sweep.rules?"),
        (["+sweep.env={A: [1, '1']}"], "sweep.env.A: 1 and '1' are the same for the program; leave one out"),
        (["+sweep.env={A: [null, null]}"], "sweep.env.A: null and null are the same for the program"),
        (["+sweep.env.1BAD=[a]"], "'+sweep.env.1BAD=[a]': a key consists of names joined by dots; a name consists of "
        "letters, digits and '_' and does not start with a digit"),
        (["sweep.strategy=adaptiv"], "did you mean adaptive?"),
        (["sweep.cp_exchange=[rings]"], "sweep.cp_exchange='rings'; must be ring or allgather; did you mean ring?"),
        (["+sweep.env={A: [1, true]}"], "sweep.env.A: 1 and True are the same for the program"),
        (["+sweep.python=[/a, /a]"], "sweep.python: '/a' and '/a' are the same for the program"),
        (["+sweep.flags={q: {a: [-x], b: [-x]}}"], "sweep.flags.q: a and b are the same for the program"),
        ([WORDS[0].replace("2", "'1'")], "sweep.words.etp: 1 and '1' are the same for the program"),
        (["+sweep.env={A: [1]}", "+kernel.env={A: '1'}"], "sweep.env.A and kernel.env.A are both set; give only one"),
        (["+sweep.flags={q: [1]}"], "write {VALUE: [ARGUMENT, ...]}, such as sweep.flags: {overlap: {on: "),
        (["kernel.flags={recomput: {a: []}}"], "unknown knob, axis or field of the model in kernel.flags: 'recomput'; "
        "did you mean recompute?"),
        (["kernel.supports={hidden_sise: [64]}"], "unknown axis or field of the model in kernel.supports: "
        "'hidden_sise'; did you mean hidden_size?"),
        ([*KNOBS, "+sweep.flags={grap: [none]}"], "unknown knob in sweep.flags: 'grap'; did you mean graph?"),
        ([*KNOBS, "+sweep.flags={graph: [non]}"], "unknown value of sweep.flags.graph: 'non'; did you mean none?"),
        ([*KNOBS, "+sweep.flags={graph: []}"], "sweep.flags.graph is empty; list at least one value"),
        ([*KNOBS, "+sweep.flags={graph: [none, none]}"], "sweep.flags.graph lists none twice; leave one out"),
        ([*KNOBS, "+sweep.flags={graph: {a: []}}"], "sweep.flags.graph maps values to arguments, as kernel command "
        "does; list values instead, such as +sweep.flags.graph=[none,full]"),
        ([*KNOBS, "+sweep.words={parts: [2]}"], "sweep.words.parts: parts is a knob of kernel command; list it in "
        "sweep.flags"),
        ([*KNOBS, "kernel.knob_values={grph: none}"], "unknown knob in kernel.knob_values: 'grph'; did you mean "
        "graph?"),
        ([*KNOBS, "kernel.knob_values={graph: fll}"], "unknown value of kernel.knob_values.graph: 'fll'; "
        "did you mean full?"),
        (["kernel.knobs={tp: what it is}"], "kernel.knobs.tp: tp is already a word of every run"),
        (["kernel.knobs={other: what it is}"], "kernel.knobs.other has no values; map them to arguments"),
        (["kernel.flags={graph: {a: []}}", "kernel.knobs={graph: ' '}"],
         "kernel.knobs.graph is empty; say in words what it sets"),
        (["kernel.flags={recompute: {a: []}}", "kernel.flags_at_end=[recomput]"],
         "unknown name of kernel.flags in kernel.flags_at_end: 'recomput'; did you mean recompute?"),
        (["kernel.spans={tq: node}"], "unknown degree in kernel.spans: 'tq'"),
        (["kernel.spans={tp: rack}"], "kernel.spans.tp='rack'; must be node, nvlink_domain, nvlink_rack or a number of "
        "ranks, or {KNOB: {VALUE: one of these}}"),
        (["kernel.spans={tp: 0}"], "kernel.spans.tp=0; must be at least 1 rank"),
        ([*KNOBS, "kernel.spans={tp: {grph: {full: node}}}"], "unknown knob in kernel.spans.tp: 'grph'; did you mean "
        "graph?"),
        ([*KNOBS, "kernel.spans={tp: {graph: {fll: node}}}"], "unknown value of kernel.spans.tp.graph: 'fll'; did you "
        "mean full?"),
        ([*KNOBS, "kernel.spans={tp: {graph: {full: 0}}}"], "kernel.spans.tp.graph.full=0; must be at least 1 rank"),
        (["+sweep.words={zz: [1]}"], "sweep.words.zz has no effect: the command does not contain {zz}; use {zz}"),
        (["+sweep.words={tp: [1]}"], "tp is already a word of every run; choose another name"),
        ([WORDS[0], "+sweep.rules=['etp divide dp']"], "write NAME divides NAME, or use <=, >= or =="),
        ([WORDS[0], "+sweep.rules=['etp divides dpp']"], "did you mean pp?"),
        ([WORDS[0].replace("1, 2", "a, b"), WORDS[1]],
         "sweep.rules 'etp divides dp' compares numbers; sweep.words.etp=['a', 'b']; list only numbers there"),
        (["sweep.recompute=[ful]"], "did you mean full?"), (["kernel.precision=BF16"], "did you mean bf16?"),
        (["+sweep.rules=['precision == 2']"], "unknown numeric word in sweep.rules 'precision == 2': 'precision'"),
        (["+sweep.flags={tp: {a: []}}"], "sweep.flags.tp: tp is already a word of every run; choose another name"),
        (["+sweep.words={api_token: [1]}"], "sweep.words.api_token looks like a secret"),
        (["+kernel.compile=[true,false]"], "kernel.compile lists several values, which only ultrabench's own "
        "kernel supports"),
        (["+sweep.container=[a,b]"], "sweep.container has no effect: no command contains {container}"),
        (["kernel.precision=[fp32,fp15]"], "kernel.precision='fp15'"),
        (["sweep.seq_len=[]"], "sweep.seq_len is empty; list at least one value"),
    ],
)  # fmt: skip
def test_what_cannot_vary_is_refused_in_one_line(words, line):
    with refused(line):
        arguments = ',"--etp={etp}"' if "etp" in str(words) else ""
        plan(f"kernel.command=[train{arguments}]", *words)


def arguments_of(run):
    return fill_in(run.spec, AttemptKey(run.run_id, 0, 0), ALL.config.measure)[1:]


def test_knobs_of_a_kernel_file_are_options_within_a_cell():
    program = (*KNOB_PROGRAM, *KNOBS)
    (usual,) = plan(program=program).runs
    assert (usual.spec.variant, arguments_of(usual)) == ({}, ["--parts=2"])
    varied = plan("+sweep.flags={graph: [none, full], parts: [1, 4]}", program=program)
    parts_arguments = {1: [], 4: ["--parts=4"]}
    assert {str(run.spec.variant): arguments_of(run) for run in varied.runs} == {
        str({"flags.graph": graph, "flags.parts": parts}): [*graph_arguments, *parts_arguments[parts]]
        for graph, graph_arguments in (("none", []), ("full", ["--graph=full"]))
        for parts in (1, 4)
    }
    mapped = plan('+sweep.flags={graph: {none: [], full: ["--graph=full"]}}', program=KNOB_PROGRAM)
    listed = plan("+sweep.flags.graph=[none,full]", program=program)
    assert {run.run_id for run in mapped.runs} == {run.run_id for run in listed.runs}


def test_a_knob_of_a_file_may_have_any_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ultrabench" / "kernel" / "mine.yaml"
    path.parent.mkdir(parents=True)
    text = "defaults: [command, _self_]\ncommand: [train]\nknobs: {overlap: what hides, parts: parts of the loss}\n"
    text += "flags: {overlap: {off: [], on: [--overlap]}, parts: {'*': ['--parts={parts}']}}\n"
    path.write_text(text)
    with refused(
        f"{path}: kernel.knobs.parts has only the value '*', so that no usual value is known; give one"
    ):
        plan(program=("kernel=mine",))
    path.write_text(f"{text}knob_values: {{parts: 2, overlap: on}}\n")
    varied = plan("+sweep.flags={overlap: [on, off], parts: [3]}", program=("kernel=mine", "sweep.tp=[1]"))
    assert {run.spec.variant["flags.overlap"]: arguments_of(run) for run in varied.runs} == {
        "on": ["--overlap", "--parts=3"],
        "off": ["--parts=3"],
    }
    (usual,) = plan(program=("kernel=mine", "sweep.tp=[1]")).runs
    assert arguments_of(usual) == ["--overlap", "--parts=2"]
    digests = {usual.spec.kernel.digest(), replace(usual.spec.kernel, knob_values={"parts": "4"}).digest()}
    assert len(digests) == 2


def test_a_knob_that_changes_nothing_in_a_run_runs_once():
    precisions = "kernel.precision=[bf16,fp8]"
    both = plan("+sweep.flags.recipe=[delayed,rowwise]", precisions, program=(*KNOB_PROGRAM, *KNOBS))
    (left_out,) = (candidate for candidate in both.candidates if not candidate.runs)
    assert (left_out.spec.kernel.precision, left_out.spec.variant["flags.recipe"]) == ("bf16", "rowwise")
    reason = "recipe=rowwise changes nothing in this run: the one with recipe=delayed has the same command"
    assert (left_out.rule, left_out.reason, len(both.runs)) == ("kernel", reason, 3)


def test_only_a_command_whose_file_has_it_is_told_a_routing():
    program = (*KNOB_PROGRAM, "model=tiny-moe", "sweep.ep=[1]")
    declared = "kernel.flags={routing: {balanced: [--balance], learned: []}}"
    plans = [
        plan(*words, program=program) for words in ((), (declared,), (declared, "kernel.routing=learned"))
    ]
    undeclared, balanced, learned = (plan.runs[0] for plan in plans)
    assert undeclared.run_id == balanced.run_id != learned.run_id
    assert [arguments_of(run) for run in (undeclared, balanced, learned)] == [[], ["--balance"], []]
    assert [run.spec.kernel.routing_of(run.shape) for run in (undeclared, learned)] == [None, "learned"]
    (skewed,) = plan(declared, 'kernel.routing="skew=0.5"', program=program).candidates
    assert skewed.reason == "kernel command supports routing in [balanced, learned]; routing=skew=0.5"
    (unknown,) = plan("kernel.routing=learned", program=program).candidates
    assert "add routing to kernel.flags, or leave kernel.routing out" in unknown.reason


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ('{"etp"}', 'sweep.words.etp has no effect: the command has {"etp"} instead; use {etp}'),
        ("{etq}", "sweep.words.etp has no effect: the command has {etq} instead; use {etp}"),
        ("{words.etp}", "the command has {words.etp} instead; use {etp}"),
        ('{etp} {"tp"}', 'kernel.command has {"tp"}; braces may contain only the word: write {tp}'),
        ("{etp} { tp }", "kernel.command has { tp }; braces may contain only the word: write {tp}"),
        ("{etp} {etq}", "unknown word in kernel.command of kernel=command '{etq}' (known: etp, "),
    ],
)
def test_a_word_that_stands_wrongly_in_braces_is_named(argument, line):
    with refused(line):
        plan(WORDS[0], f"kernel.command=[train,'{argument}']")


def test_braces_of_the_program_itself_stay():
    run = plan(WORDS[0], """kernel.command=[train,'{"lr": 1} {"lr"} {etp}']""").runs[0]
    words = fill_in(run.spec, AttemptKey(run.run_id, 0, 0), ALL.config.measure)
    assert words == ["train", '{"lr": 1} {"lr"} 1']


def test_variables_are_texts_and_null_unsets_them():
    values = plan("+sweep.env={A: [true, 2, null]}", "kernel.command=[train]").config.options.values
    assert values["env.A"] == ("1", "2", None)


def test_an_interpreter_that_cannot_start_the_agents_is_refused_where_it_can_be_asked(tmp_path):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho No module named ultrabench >&2; exit 1\n")
    bare.chmod(0o755)

    def require(*words):
        require_program(plan("kernel.command=[env,train]", *words).config)

    for launcher in ("launcher=local", "launcher=slurm"):
        with refused(
            f"sweep.python={bare} cannot start the agents of ultrabench: No module named ultrabench; install"
        ):
            require(f"+sweep.python=[{sys.executable},{bare}]", launcher)
    with refused(f"sweep.python={tmp_path}/none is not a program here"):
        require(f"+sweep.python=[{tmp_path}/none]", "launcher=local")
    for words in ([f"[{tmp_path}/none,python]"], [f"[{bare}]", "launcher.setup=['export PYTHONPATH=/x']"],
                  [f"[{bare}]", "launcher.srun=['--container-image=x']"]):  # fmt: skip
        require(f"+sweep.python={words[0]}", "launcher=slurm", *words[1:])


@pytest.mark.parametrize(
    ("hardware", "precision", "attention", "different"),
    [
        ("cpu", "fp32", "auto,flash", False), ("cpu", "fp32", "auto,math", True),
        ("h100x8", "bf16", "cudnn,auto", False), ("h100x8", "bf16", "auto,flash", True),
        ("h100x8", "bf16,fp32", "auto,math", False), ("a100-80x8", "bf16", "flash,auto", False),
    ],
)  # fmt: skip
def test_auto_is_refused_beside_the_attention_that_it_becomes(hardware, precision, attention, different):
    words = (f"hardware={hardware}", f"kernel.precision=[{precision}]", f"kernel.attention=[{attention}]")
    if different:
        assert len({run.spec.kernel.attention for run in plan(*words, program=()).runs}) == 2
        return
    names = attention.replace(",", " and ")
    with refused(f"kernel.attention: {names} are the same for the program; leave one out"):
        plan(*words, program=())


def test_our_own_kernel_takes_no_flags():
    with refused("sweep.flags.overlap with kernel=embedded; only a command takes arguments"):
        plan(FLAGS, program=())


def test_a_command_that_does_not_tell_what_differs_is_named():
    (line,) = same_commands(plan('kernel.command=[train,"{tp}"]', "sweep.mbs=[1,2]"))
    assert line.startswith("4 of 4 runs have the same command as another run, such as dp2 tp1 pp1 z0 mbs")
    assert "which differ in mbs, gas" in line
    assert not [*same_commands(plan('kernel.command=[train,"{tp}","{mbs}"]', "sweep.mbs=[1,2]"))]
