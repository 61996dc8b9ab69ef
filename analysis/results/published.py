"""Compares the best rates of a result table with those that others published, from the files in configs/published/."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.results.cells import Cell, layout_words
from ultrabench.analysis.results.columns import RATE
from ultrabench.analysis.results.left_out import none_left
from ultrabench.analysis.results.numbers import rate_text, with_unit
from ultrabench.analysis.results.ranking import rank
from ultrabench.record import from_dict
from ultrabench.sweep.config.files import files, read_yaml, usable
from ultrabench.sweep.config.load import load_model

_MATCHED = ("model", "gpu", "precision", "seq_len", "gbs")
"""What has to be equal in two rates that are compared, the most telling first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRate:
    """A rate that others published: one of the `runs` of a file, which may lack what the top of the
    file says for all.
    """

    model: str
    gpu: str
    precision: str
    seq_len: int
    gbs: int | None
    """Sequences of a global batch; None where the source does not say."""
    nodes: int
    tokens_per_s_per_gpu: float
    what: str
    """What was trained, and by which program."""
    source: str
    """The address of the publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesidePublished:
    """The best run of a cell beside the published rate that is nearest to it."""

    cell: Cell
    published: PublishedRate
    differing: dict[str, tuple[object, object]]
    """What has to be equal and is not -> its values here and in the publication."""

    @property
    def share(self) -> float | None:
        """The rate over the published one, a fraction; None where these are of different things."""
        measured = self.cell.tokens_per_s_per_gpu
        return None if self.differing or not measured else measured / self.published.tokens_per_s_per_gpu

    @property
    def text(self) -> str:
        """One sentence with the rates, the share or what differs, and the source."""
        cell, rate = self.cell, self.published
        run_text = f"{cell.title} on {cell.nodes:,} x {cell.hardware}, {' '.join(layout_words(cell.layout))}"
        our_text = f"{run_text}: {rate_text(cell.tokens_per_s_per_gpu or 0.0)}"
        nodes_text = f", on {rate.nodes:,} instead of {cell.nodes:,} nodes" * (rate.nodes != cell.nodes)
        their_text = f"{with_unit(RATE, rate.tokens_per_s_per_gpu)}, {rate.what}{nodes_text}; {rate.source}"
        if self.share is not None:
            return f"{our_text}, {self.share:.0%} of the published rate ({their_text})"
        stated = ((name, a, "not stated" if b is None else b) for name, (a, b) in self.differing.items())
        pairs_text = ", ".join(f"{name} {a} ({b})" for name, a, b in stated)
        return f"{our_text}; no published rate matches. The nearest ({their_text}) differs: {pairs_text}"


def published_rates() -> list[PublishedRate]:
    """The runs of all files of published rates.

    Raises:
        ConfigError: a value in a file is missing or cannot be used.
    """
    rates = list[PublishedRate]()
    for path in files("published").values():
        content = read_yaml(path)
        shared = {name: content[name] for name in ("gpu", *_MATCHED, "what", "source") if name in content}
        run_fields, where = (shared | run for run in content.get("runs", ())), f"runs of {path.name}"
        rates += [from_dict(PublishedRate, run, where=where, skip_unknown=True) for run in run_fields]
    return rates


def beside_published(table: pa.Table) -> Iterator[BesidePublished]:
    """The best run of each cell of a result table beside the nearest published rate.

    Cells without a measured rate, or with suspect ones alone, are left out.

    Raises:
        ConfigError: a file of published rates cannot be used.
    """
    gpu_by_hardware = {path.stem: str(values.get("gpu")) for path, values in usable("hardware").items()}
    rates, known_models = published_rates(), files("model")
    id_by_model = {r.model: load_model(r.model).model_id for r in rates if r.model in known_models}
    if not rates:
        return
    # MFU is not compared, so that several formulas of it are no reason to refuse the table.
    index, nulls = table.column_names.index("flops_formula"), pa.nulls(len(table), pa.string())
    for cell in rank(table.set_column(index, "flops_formula", nulls)):
        if not cell.tokens_per_s_per_gpu or cell.suspect:
            continue
        values = {"model": cell.model, "gpu": gpu_by_hardware.get(str(cell.hardware), cell.hardware)}
        values |= {name: getattr(cell, name) for name in _MATCHED[2:]}

        def nearness(entry: BesidePublished) -> tuple[object, ...]:
            equalities = (name not in entry.differing for name in _MATCHED)
            return *equalities, -abs(entry.cell.nodes - entry.published.nodes)

        yield max((_beside(cell, values, rate, id_by_model.get(rate.model)) for rate in rates), key=nearness)


def none_comparable(table: pa.Table) -> str:
    """Why `beside_published` finds no cell in a table, and what to do."""
    if not published_rates():
        return "configs/published/ has no rates; add some in ./ultrabench/published/NAME.yaml"
    columns = ["sweep", "run_id", "status", "suspect", "suspect_codes", "stopped", "screened"]
    runs = table.filter(pc.field("is_final")).select(columns)
    return str(none_left(runs.to_pandas(), "none can be compared"))


def _beside(cell: Cell, values: dict[str, Any], rate: PublishedRate, model_id: str | None) -> BesidePublished:
    """A cell beside a rate; models are equal by their shapes where both are known, else by their names."""
    value_pairs = {name: (values[name], getattr(rate, name)) for name in _MATCHED}
    if None not in (cell.model_id, model_id):
        is_same_model = cell.model_id == model_id
        other_name = f"{cell.model} of another shape" if cell.model == rate.model else cell.model
        value_pairs["model"] = (rate.model if is_same_model else other_name, rate.model)
    differing = {name: pair for name, pair in value_pairs.items() if pair[0] != pair[1]}
    return BesidePublished(cell=cell, published=rate, differing=differing)
