"""Hypothesis strategies for the words of ultrabench: layouts, shapes, specs, results, journals."""

from hypothesis import strategies as st

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import PP_SCHEDULES, Layout
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.record import raw_json
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey, RunSpec, Workload
from ultrabench.store.events import (
    Adopted,
    AllocationEnded,
    AllocationPlanned,
    AllocationStarted,
    Cancel,
    Claimed,
    EndCode,
    Failed,
    Launched,
    LeadingAgent,
    Line,
    Pause,
    Phase,
    Preflight,
    Result,
    Start,
    Started,
    Submitted,
    Submitting,
    decode,
    encode,
)  # fmt: skip

FAILURES = tuple(s for s in Status if s not in (Status.OK, Status.SKIPPED, Status.REJECTED))
RUN_IDS = ("aaaa000011112222", "bbbb000011112222", "cccc000011112222")
ALLOCATIONS = ("n1-00000000", "n2-11111111")


def written(event, *, writer="w", seq=0, time=0.0):
    """The line of a journal in which this event is read."""
    return decode(encode(Line(event=event, writer=writer, seq=seq, time=time)).rstrip())


def divisors(number):
    """Whole divisors of `number`."""
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def layouts(draw, *, most=8, zero_stages=(0, 1, 2, 3)):
    """Any layout that Layout accepts, cp and virtual stages included."""
    small = st.integers(1, most)
    pp = draw(small)
    schedule = "none" if pp == 1 else draw(st.sampled_from(PP_SCHEDULES[1:]))
    return Layout(
        dp=draw(small), tp=draw(small), pp=pp, cp=draw(st.integers(1, 3)),
        zero_stage=draw(st.sampled_from(zero_stages)), mbs=draw(small), gas=draw(st.integers(1, 2 * most)),
        pp_schedule=schedule, virtual_stages={"interleaved": draw(st.integers(2, 3)), "zbv": 2}.get(schedule, 1),
        recompute=draw(st.sampled_from(("none", "attention", "selective", "every2", "every3", "full"))),
    )  # fmt: skip


LONG = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)  # fmt: skip
"""As Llama 3.1 has it."""


@st.composite
def shapes(draw):
    """Any model that ModelShape accepts."""
    heads = draw(st.integers(1, 32))
    return ModelShape(
        name=draw(st.text(min_size=1, max_size=8)), hidden_size=heads * 2 * draw(st.integers(1, 64)),
        num_hidden_layers=draw(st.integers(1, 96)), num_attention_heads=heads,
        num_key_value_heads=draw(divisors(heads)), intermediate_size=draw(st.integers(1, 20000)),
        vocab_size=draw(st.integers(1, 200000)), tie_word_embeddings=draw(st.booleans()),
        rope_theta=draw(st.floats(1.0, 1e7)), rms_norm_eps=draw(st.floats(1e-9, 1e-3)),
        head_dim=draw(st.none() | st.integers(1, 128).map(lambda n: 2 * n)), qk_norm=draw(st.booleans()),
        rope_scaling=draw(st.none() | st.just(LONG)), sliding_window=draw(st.none() | st.integers(1, 8192)),
    )  # fmt: skip


def embedded_kernels():
    """Our own kernel."""
    return st.builds(
        KernelConfig, name=st.just("embedded"), version=st.integers(1, 9),
        precision=st.sampled_from(("fp32", "bf16", "fp64")),
    )  # fmt: skip


def command_kernels():
    """Programs of a user."""
    words = st.text(max_size=12)
    return st.builds(
        KernelConfig, name=st.just("command"), kind=st.just("command"), precision=st.sampled_from(("fp32", "bf16")),
        compile=st.booleans(), command=st.lists(words, min_size=1, max_size=4).map(tuple),
        env=st.dictionaries(words, words, max_size=2), folder=st.none() | st.just("src"),
        files=st.dictionaries(st.sampled_from(("a.json", "conf/b")), words, max_size=2),
        loss_comparable=st.none() | st.booleans(),
        supports=st.dictionaries(
            st.sampled_from(("pp", "tp", "zero_stage")), st.lists(st.integers(0, 8), max_size=3).map(tuple), max_size=2,
        ),
        step_line=st.none() | st.just(r"(?P<seconds>\S+) s"),
        memory_line=st.none() | st.just(r"(?P<reserved_gib>\S+)GiB"),
        mfu_line=st.none() | st.just(r"(?P<percent>\S+)%"), step_rank=st.just("last_stage") | st.integers(-1, 7),
    )  # fmt: skip


@st.composite
def run_specs(draw):
    """Any run: its nodes fit its layout, its batch the workload."""
    layout = draw(layouts())
    per_node = draw(divisors(layout.world_size))
    return RunSpec(
        shape=draw(shapes()),
        workload=Workload(seq_len=draw(st.integers(1, 8192)), gbs=layout.gbs, seed=draw(st.integers(0, 99))),
        layout=layout, kernel=draw(embedded_kernels() | command_kernels()), nodes=layout.world_size // per_node,
        gpus_per_node=per_node,
    )  # fmt: skip


@st.composite
def results(draw, statuses=tuple(s for s in Status)):
    """Any result of an attempt; an ok one has step times."""
    status = draw(st.sampled_from(statuses))
    ok = status == Status.OK
    seconds = st.floats(1e-6, 1e4)
    count = st.none() | st.integers(0, 2**40)
    return RunResult(
        status=status, reason=None if ok else draw(st.text(max_size=20)),
        measured_by=draw(st.sampled_from((None, "report", "log"))),
        stopped=draw(st.sampled_from((None, "interval", "max_steps", "program"))),
        ci_reached=draw(st.none() | st.booleans()),
        step_times_s=tuple(draw(st.lists(seconds, min_size=int(ok), max_size=4))),
        loss_final=draw(st.none() | st.floats(0, 20)), peak_mem_allocated_bytes=draw(count),
        peak_mem_reserved_bytes=draw(count), init_time_s=draw(st.none() | seconds),
        started_at=draw(st.none() | st.floats(0, 2e9)), duration_s=draw(st.none() | seconds),
        hostnames=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
        env_id=draw(st.none() | st.just("e" * 16)),
        evidence=draw(st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)),
    )  # fmt: skip


def events():
    """Anything that a journal may say; an ok is a `Result`, any other end is `Failed`."""
    repeats, attempts, number = st.integers(0, 1), st.integers(0, 2), st.integers(1, 99)
    allocation, seconds = st.sampled_from(ALLOCATIONS), st.none() | st.floats(0, 1e5)
    restart, generation = st.integers(0, 2), st.integers(1, 6)
    keys = st.builds(AttemptKey, st.sampled_from(RUN_IDS), repeats, attempts)
    start = st.builds(Start, job_id=st.sampled_from(("", "57_0", "61_0")), restart=restart)
    job, spec = st.fixed_dictionaries({"pid": number}), {"nodes": 1, "gpus_per_node": 2}

    def attempt(kind, **values):
        run_id = st.sampled_from(RUN_IDS)
        return st.builds(kind, run_id=run_id, repeat=repeats, attempt=attempts, **values)

    def held(kind, **values):
        return st.builds(kind, allocation=allocation, **values)

    return st.one_of(
        attempt(Claimed, allocation=allocation, job=start, spec=st.just(raw_json(spec))),
        attempt(Started, allocation=allocation, scratch=st.sampled_from(("/a", "/b"))),
        attempt(Phase, name=st.sampled_from(("init", "warmup", "measure"))),
        attempt(Result, result=results(statuses=(Status.OK,))),
        attempt(
            Failed, source=st.sampled_from(("agent", "slurm", "launcher")), result=results(statuses=FAILURES)
        ),
        held(
            AllocationPlanned, nodes=number, limit_s=st.floats(1, 1e4), tasks=st.lists(keys).map(tuple),
            control=st.none() | st.just("cccc"),
        ),
        held(Submitting, token=st.text(max_size=4)),
        held(Submitted, job=job),
        held(Adopted, job=job),
        held(AllocationStarted, agent=st.builds(LeadingAgent, node=number, pid=number, job=start)),
        held(Preflight, restart=restart, found=st.dictionaries(st.sampled_from(("probe", "nodes")), number)),
        held(
            AllocationEnded, job=start, source=st.sampled_from(("agent", "launcher")),
            reason=st.sampled_from(("all tasks done", "Slurm ended job 57_0: TIMEOUT", "no time left")),
            code=st.sampled_from(EndCode),
            elapsed_s=seconds, held_s=seconds, avoid=st.sampled_from(((), ("gpu01",), ("gpu01", "gpu02"))),
        ),
        st.builds(
            Launched, generation=generation, config=st.fixed_dictionaries({"name": st.text(max_size=3)}),
            retry=st.lists(keys, max_size=2).map(tuple),
        ),
        st.builds(Pause, generation=generation, on=st.booleans()),
        st.builds(Cancel, generation=generation),
    )  # fmt: skip


@st.composite
def journals(draw, most_writers=3, most_events=8):
    """A list of whole journal files: the lines of each writer, numbered from 0."""
    files = []
    for n in range(draw(st.integers(1, most_writers))):
        clock, drawn = draw(st.floats(0, 2e9)), draw(st.lists(events(), max_size=most_events))
        files.append(
            [written(e, writer=f"agent-host-{n}", seq=i, time=clock + i) for i, e in enumerate(drawn)]
        )
    return files
