"""The page of `ultrabench report` in a real browser, opened from disk."""

import itertools
import random
import re
import shutil

import matplotlib
import pyarrow.compute as pc
import pytest

from tests.patience import slowness
from tests.unit.analysis.page_tables import large, page, repeated, run, small
from tests.unit.analysis.tables import table_of
from ultrabench.analysis.figures.plots import scaling
from ultrabench.analysis.results.collect import read_parquet
from ultrabench.analysis.results.numbers import with_unit
from ultrabench.analysis.results.ranking import leaderboard
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import write_plan

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


WRONG = []
"""What the page has said or asked for that it must not."""


@pytest.fixture(scope="module")
def only_tab():
    """The tab of all tests: its process keeps the code of the figures, which is most of a page."""
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, timeout=120_000)
        tab = started.new_context(offline=True).new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: message.type == "info" or WRONG.append(message.text))
        tab.on("pageerror", lambda error: WRONG.append(str(error)))
        tab.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or WRONG.append(sent.url))
        yield tab
        started.close()


@pytest.fixture
def opened(only_tab, tmp_path):
    """Opens a table as a page with a fragment; at the end there was no error and no request to a network."""

    def open_page(results, fragment="", width=1400, public=False):
        path = tmp_path / "report.html"
        path.write_text(page(results, public=public), encoding="utf-8")
        only_tab.goto("about:blank")  # with another fragment alone it would stay the same page
        only_tab.emulate_media(media="null", color_scheme="null")
        only_tab.set_viewport_size({"width": width, "height": 900})
        only_tab.goto(f"file://{path}{fragment}")
        return only_tab

    yield open_page
    only_tab.goto("about:blank")
    wrong = [*WRONG]
    WRONG.clear()
    assert wrong == []


def text_of(tab, place):
    return tab.locator(place).first.inner_text()


def select(tab, name, value):
    tab.get_by_role("combobox", name=name, exact=True).select_option(value)
    return tab.evaluate("location.hash")


def test_a_cell_opens_its_layouts_and_a_layout_its_evidence(opened):
    tab = opened(small())
    cells = tab.locator(".heatmap button")
    assert cells.count() == 4
    assert "11 tried, 1 oom" in cells.first.inner_text()
    assert "1 suspect" in cells.last.inner_text()
    assert re.search(
        r"in all rows whatever the filters\s[\s\S]*tp\s+2\s+1\s+\d\.\d+\s", text_of(tab, "#sections")
    )
    cells.first.focus()
    tab.keyboard.press("Enter")
    assert text_of(tab, "#runs-title") == "Layouts of 1B on 1 node"
    assert tab.evaluate("document.activeElement.id") == "runs-title"
    tab.locator(f"[data-run='{101:016x}']").click()
    about = text_of(tab, ".about-run")
    assert "<script>alert(1)</script> on n7" in about
    assert re.search(r"3\s+train\s+1\s+boom <b>", about)
    assert f"ultrabench sweep show {101:016x} --sweep s" in about
    assert "run=" in tab.url
    tab.go_back()
    about = playwright.expect(tab.locator(".about-run"))
    about.to_have_count(0, timeout=60_000)  # the page hears of going back by a later event
    assert tab.evaluate("document.activeElement.dataset.run") == f"{101:016x}"


def test_a_cell_looks_as_in_the_heatmap(opened):
    rules = enumerate(("heads", "kernel", "heads"))
    refused = [run(n, status="rejected", reason="no", rule=rule, attempt=None) for n, rule in rules]
    wide = run(2, nodes=2, mfu=0.4, ci_reached=False, step_time_ci95_rel=0.53)
    tab = opened(table_of(run(1, mfu=0.3), wide, *refused))
    cells = tab.locator(".heatmap button")
    texts = cells.all_inner_texts()
    assert "+-" not in texts[0]
    assert "40.0 %\n+- 53.0 %\n" in texts[1]
    weights = "all => all.map((one) => getComputedStyle(one).fontWeight)"
    assert tab.locator(".headline").evaluate_all(weights) == ["700", "400"]
    shown = cells.evaluate_all(
        "all => all.map((one) => one.style.backgroundColor.match(/\\d+/g).map(Number))"
    )
    for colour, share in zip(shown, (0.75, 1.0), strict=True):
        assert colour == pytest.approx([255 * c for c in matplotlib.colormaps["viridis"](share)[:3]], abs=4)
    assert "3 layouts rejected: 2 by rules, 1 by the kernel" in text_of(tab, "#about")


def test_a_filter_is_kept_in_the_fragment_and_closes_what_it_excludes(opened):
    link = f"cell=1B%2C1&run={0:016x}"
    tab = opened(small(), f"#{link}")
    assert select(tab, "tp", "1") == f"#tp=1&{link}"
    assert select(tab, "tp", "4") == "#tp=4&cell=1B%2C1"
    shown = text_of(tab, ".heatmap")
    assert ("tp4" in shown, "tp1" in shown) == (True, False)
    count = text_of(tab, "#count")
    assert select(tab, "model", "8B") == "#tp=4&model=8B"
    assert not tab.locator("#runs").is_visible()
    reopened = opened(small(), "#tp=4&cell=8B,2")
    assert text_of(reopened, "#count") == count
    assert text_of(reopened, "#runs-title") == "Layouts of 8B on 2 nodes"
    reopened.get_by_role("button", name="Show all").first.click()
    assert reopened.evaluate("location.hash") == "#cell=8B%2C2"


OOM = [run(n, status="oom", reason="CUDA out of memory") for n in range(3)]


IN_REPEATS = "1 of 2 repeats failed, 6 tried, 1 oom, 2 failed, 1 suspect, 1 pending"


@pytest.mark.parametrize(
    ("results", "fragment", "patterns"),
    [
        (table_of(), "", {"#how": "so there is nothing to rank."}),
        (table_of(*OOM), "", {".heatmap button": "^all 3 oom$"}),
        (repeated(), "", {".heatmap button": IN_REPEATS, "#hours": "GPU hours in total",
                         "#how": r"^Each cell shows the fastest layout, .*: its MFU, the interval .* Select a cell "}),
        (small(), "#cell=8B,2", {"#hours": r"oom\s+1\s+unknown\s[^%]*unknown for 1 attempt",
                                 "#runs-table": "throttled: <b>power</b>"}),
        (small(), "#tp=16&nobody=1&status=oom",
         {"#count": "^1 of 40 rows shown. The link selects tp=16, nobody=1, which"}),
        (small(), "#cell=1B%2C1&model=8B", {"#count": "The link selects cell=1B,1, which this page does not contain"}),
    ],
    ids=["empty", "all failed", "repeats", "in doubt", "unknown link", "excluded link"],
)  # fmt: skip
def test_the_page_tells_what_was_tried_and_what_it_does_not_show(opened, results, fragment, patterns):
    tab = opened(results, fragment)
    for place, pattern in patterns.items():
        assert re.search(pattern, text_of(tab, place))


def test_a_link_to_a_run_opens_it_and_the_skip_link_keeps_the_filters(opened):
    tab = opened(large(1600), f"#cell=1B%2C2&run={1401:016x}")
    assert f"Run {1401:016x}" in text_of(tab, ".about-run")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "best"
    assert f"run={1401:016x}" in tab.url


def test_a_public_page_has_commands_for_the_layout_and_none_for_the_sweep(opened):
    about = text_of(opened(small(), f"#cell=1B%2C1&run={101:016x}", public=True), ".about-run")
    assert "ultrabench predict model=1B" in about
    assert "sweep show" not in about
    assert "boom" not in about


def test_a_phone_scrolls_only_tables_sideways(opened):
    tab = opened(small(), "#cell=8B,2", width=400)
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    box = tab.locator("#runs-table .scroll").first
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    assert "rgba(128, 128, 128, 0.6)" in box.evaluate("box => getComputedStyle(box).backgroundImage")


def drawn(tab, figure):
    """The figure when it is drawn and in view."""
    tab.locator(f"#{figure}").scroll_into_view_if_needed()
    tab.wait_for_selector(f"#picture-{figure}[data-drawn]")
    element = tab.locator(f"#{figure}")
    assert element.locator("canvas").count() > 0
    return element


CLICKED = "summary => (summary.click(), [...summary.parentNode.querySelectorAll('tbody tr')].map((tr) => tr.innerText))"


def numbers(figure):
    """The first three cells of each line below a figure, read in the same task of the browser as they are opened."""
    return [line.split("\t")[:3] for line in figure.locator("summary").evaluate(CLICKED)]


def test_figures_are_drawn_when_seen_and_have_their_numbers_as_a_table(opened):
    tab = opened(small(), "#y=step_time_s&x=tp")
    best = drawn(tab, "best-of")
    assert "with any values of the other axes; suspect" in best.locator("p").inner_text()
    times = ["1B on 1|1|2.5", "1B on 1|2|2.575", "1B on 1|4|2.65", "1B on 2|1|2.75"]
    assert ["|".join(cells) for cells in numbers(best)[:4]] == times
    assert "crosses: 1 that are suspect or stopped early" in drawn(tab, "every").locator("p").inner_text()
    tab.evaluate("views.every.model.renderers[0].data_source.selected.indices = [2]")
    assert "Layouts of 1B" in text_of(tab, "#runs-title")
    assert tab.locator(".about-run").count() == 1
    drawn(tab, "links")
    measured, *parts = numbers(drawn(tab, "memory"))[:3]
    assert measured == ["measured", "1B on 1", "200"]
    assert [part[:2] for part in parts] == [["weights", "1B on 1"], ["gradients", "1B on 1"]]


def test_a_print_is_light_and_has_all_figures_and_no_controls(opened):
    tab = opened(small())
    tab.emulate_media(color_scheme="dark")
    for figure in ("every", "best-of", "memory", "links"):  # without scrolling to them
        tab.wait_for_selector(f"#picture-{figure}[data-drawn=dark]")
    tab.emulate_media(color_scheme="dark", media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not any(tab.locator(name).is_visible() for name in ("#filters", "#axes", "#links summary"))
    assert tab.locator("[data-drawn=dark]").count() == 4
    content = "getComputedStyle(document.getElementById('picture-links'), '::before').content"
    message = tab.evaluate(f"() => (figuresChanged(), {content})")  # before it is drawn again
    assert message == '"This figure was not drawn yet: print again."'


def test_texts_of_numbers_are_those_of_the_terminal(opened):
    tab = opened(table_of())
    numbers = {
        "mfu": (0.4321, 0.00512, 1.2), "peak_mem_reserved_bytes": (2**30, 3 * 2**33, 10**8, 2**30 - 1, 2**30 * 9.996),
        "step_time_s": (2, 0.123456),
        "allreduce_busbw_bytes_per_s": (4.2e11, 123.0, 9.996e8, 9.994e8, 999.7), "tokens_per_s_per_gpu": (12345.6,),
        "sm_clock_hz": (1.98e9,), "power_w_mean": (611.2,), "energy_j_per_step": (48_000.0,),
        "tokens_per_j": (12.3456,), "checkpoint_bytes_per_s_per_node": (12e9,), "foreign_load": (0.25,),
        "model_flops_per_s_per_gpu": (3.88e14, 1.5e15), "loss_final": (6.048331,), "nodes": (1024,),
        "p_oom": (0, 1e-19, 0.0001),
        "dp_shard": (0, 8),
    }  # fmt: skip
    pairs = [(name, number) for name, several in numbers.items() for number in several]
    texts = tab.evaluate("pairs => pairs.map(([name, number]) => text(name, number))", pairs)
    assert texts == [with_unit(name, number) for name, number in pairs]


def test_4104_rows_paint_and_filter_at_once(opened):
    """Limits are ten times those of an idle machine, and more on a slow one; -s prints the times."""
    tab = opened(large(4104))
    painted = tab.wait_for_function("performance.getEntriesByType('paint')[0]?.startTime").json_value()
    for tp in ("1", "2", "4"):
        select(tab, "tp", tp)
    drawn = tab.evaluate("performance.getEntriesByName('draw').map((one) => one.duration)")[1:]
    size = tab.evaluate("document.documentElement.outerHTML.length") / 1e6
    print(f"{size:.1f} MB, first paint {painted:.0f} ms, filters {[round(time) for time in drawn]} ms")
    assert size < 8
    pace = slowness()
    assert painted < 20_000 * pace
    assert min(drawn) < 2_000 * pace


def test_a_page_of_probes_draws_their_bandwidth(opened):
    none = dict.fromkeys(("model", "dp", "tp", "mfu", "tokens_per_s_per_gpu", "step_time_s"))
    tab = opened(table_of(*(run(n, nodes=2**n, kernel="probe", **none) for n in range(3))))
    assert numbers(drawn(tab, "links")) == [
        ["allreduce", "1", "400"], ["allreduce", "2", "200"], ["allreduce", "4", "133.3"],
    ]  # fmt: skip
    assert "None of the shown rows has these numbers" in text_of(tab, "#every")


def test_screened_runs_have_a_filter_and_hollow_dots(opened):
    """Runs by parts of steps may lead a cell before one is measured in full."""
    by_parts = {"measured_gas": "2,4", "screened": True}
    rows = [
        run(n, **facts) for n, facts in enumerate(({}, {}, by_parts, {"screened": True}, {"suspect": "hot"}))
    ]
    tab = opened(table_of(*rows, run(5, **by_parts, step_time_ci95_rel=1.3)))
    script = "views.every.model.renderers.map((r) => [r.glyph.fill_alpha.value, r.data_source.data.y.length])"
    drawn(tab, "every")
    assert tab.evaluate(script) == [[0.65, 2], [0, 3], [1, 1]]
    note = text_of(tab, "#note-every")
    assert (
        "crosses: 1 that are suspect or stopped early; hollow: 3 by parts of steps or few whole steps" in note
    )
    tab.locator(".heatmap button").first.click()
    assert "+- 100 % or more" in text_of(tab, "#runs-table")
    for kind, number in (("in parts", 2), ("few steps", 1), ("in full", 3)):
        assert select(tab, "measured", kind).startswith(f"#measured={kind.replace(' ', '+')}&")
        assert text_of(tab, "#count") == f"{number} of 6 rows shown."
    unscreened = opened(table_of(*rows[:2]))
    assert unscreened.get_by_role("combobox", name="measured", exact=True).count() == 0


def drawn_cell(seed):
    """The rows of a cell: repeats beside controls, suspects, stopped runs, failures and environments."""
    draw = random.Random(seed)
    control = f"{9 * seed:016x}"
    controls = [control, control, control, draw.choice((None, "other"))]
    allocations = {name: draw.choice(controls) for name in "abc"}
    for n, repeat in itertools.product(range(draw.randint(2, 7)), range(3)):
        job, ok = draw.choice("abc"), draw.random() < 0.75
        gas = draw.choice((None, None, "2,4")) if ok else None
        screened = True if ok and (gas or draw.random() < 0.25) else None
        yield run(
            9 * seed + n, repeat=repeat, allocation=job, control=allocations[job], model=f"m{seed:03}",
            num_params=seed + 1,
            status="ok" if ok else draw.choice(("oom", "crash", "skipped", None)),
            tokens_per_s_per_gpu=draw.randint(90, 110) if ok else None,
            control_ratio=draw.randint(90, 110) / 100 if ok and allocations[job] else None,
            control_ci95_rel=draw.choice([None, 0.01, 0.08]),
            step_time_ci95_rel=draw.choice((None, 0.01, 0.04, 0.2, 1.2)) if ok else None,
            suspect=draw.choice((None, None, None, "hot")) if ok else None,
            stopped=draw.choice((None, None, "slower_than_best")) if ok else None,
            step_time_s=10.0 if ok else None, measured_gas=gas, screened=screened,
            parts_step_time_s=draw.choice((None, 9.0, 10.5)) if ok and not screened else None,
            parts_ci95_rel=draw.choice((None, 0.01, 0.03)) if ok else None,
            env_id=draw.choice("aab" if seed % 4 == 0 else "a") * 16 if ok else None, kernel_digest="x",
        )  # fmt: skip


def test_the_page_ranks_what_is_shown_as_python_does_and_finds_the_points_of_the_scaling_figure(opened):
    """Ratios to a control decide in most cells, against which the larger rate of another run would win."""
    results = table_of(*(row for seed in range(40) for row in drawn_cell(seed)))
    tab = opened(results)
    for mbs in (None, 1, 2, 4):
        boards = leaderboard(results if mbs is None else results.filter(pc.field("mbs") == mbs))
        shown = "true" if mbs is None else f'value("mbs", row) === {mbs}'
        script = f"pageData.cells.map((_, n) => standings(n, (row) => {shown}).map((s) => [s.run, s.best, s.asGood]))"
        ranked = [cell for cell in tab.evaluate(script) if cell]
        assert ranked == [[[r["run_id"], r["best"], r["as_good_as_best"]] for r in board] for board in boards]
    for axis in ("mbs", "tp", "nodes"):
        runs, _ = scaling.points(results, axis)
        expected = sorted(zip(runs["run_id"][runs["is_best"]], runs[axis][runs["is_best"]], strict=True))
        script = f"state.x = '{axis}', state.y = 'tokens_per_s_per_gpu', bestPoints(shownRows()).points"
        points = tab.evaluate(f"({script}).map(({{ row, x }}) => [value('run_id', row), x])")
        assert sorted(map(tuple, points)) == expected


def test_sliders_choose_a_layout_of_a_plan_and_show_the_memory_that_it_was_predicted(opened, tmp_path):
    words = (
        "model=llama3-8b",
        "hardware=h100x8",
        "sweep.tp=[1]",
        "sweep.mbs=[2]",
        "sweep.recompute=[none,full]",
    )
    plan = make_plan(load_config([*words, "max_p_oom=1"]))
    write_plan(plan.candidates, tmp_path / "plan.parquet", plan.config)
    tab = opened(read_parquet(tmp_path / "plan.parquet"))
    assert tab.locator("#about").inner_text().startswith("Predicted by a plan; nothing was measured")
    (board,) = leaderboard(read_parquet(tmp_path / "plan.parquet"))
    assert tab.evaluate("standings(0, () => true).map(({ run }) => run)") == [row["run_id"] for row in board]
    assert tab.locator("#fit input").count() == 4, "of pp, schedule, ZeRO and recomputation"
    for pp, recompute in ((4, "full"), (1, "none"), (8, "none")):
        for name, place in (("pp", [1, 2, 4, 8].index(pp)), ("recompute", ["none", "full"].index(recompute))):
            tab.locator(f"#fit input[name={name}]").evaluate(
                f"it => {{ it.value = {place}; it.dispatchEvent(new Event('input')) }}"
            )
        text = tab.locator("#fit [aria-live] p").inner_text()
        (run,) = (run for run in plan.runs if text.startswith(f"{run.layout.label()}: "))
        assert (run.layout.pp, run.layout.recompute) == (pp, recompute)
        assert f"{run.prediction.peak_mem_bytes / 2**30:.1f} GiB of 79.1 GiB" in text
    tab.locator("#fit input[name=pp]").evaluate(
        "it => { it.value = 0; it.dispatchEvent(new Event('input')) }"
    )
    followed = tab.locator("#fit [role=status]").inner_text()
    assert re.fullmatch(
        r"The plan has no layout with pp 1 and the other values\. Also changed: pp_schedule from \w+ to none.*",
        followed,
    )
    assert tab.locator("#fit input[name=pp_schedule]").input_value() == "0", "none is the first word"
    page = tab.locator("body").inner_text()
    assert [words for words in ("tried", "ended ok", "suspect", "attempts", " oom") if words in page] == []
    assert "predicted out of memory" in page
    assert tab.locator(".heatmap button.predicted").count() == 1


def test_a_page_of_measurements_has_no_sliders(opened):
    tab = opened(small())
    assert tab.locator("#fit").is_hidden()
    assert "Predicted" not in tab.locator("#about").inner_text()
