"""What `collect` and `heatmap` do."""

from pathlib import Path

import pyarrow as pa

from ultrabench.analysis.captions import notes
from ultrabench.analysis.cells import compare
from ultrabench.analysis.collect import collect, read_parquet, write_parquet
from ultrabench.analysis.ranking import rank
from ultrabench.cli.tables import print_json, say, warn
from ultrabench.folder import find_sweep


def run_collect(sweeps: list[str], output: Path | None, results: Path) -> None:
    """Writes one parquet file of all attempts and candidates of some sweeps."""
    folders = [find_sweep(name, results) for name in sweeps] or [find_sweep(None, results)]
    table = collect(folders, warn)
    path = output or (folders[0].path if len(folders) == 1 else results) / "runs.parquet"
    write_parquet(table, path)
    attempts = len(table) - table["attempt"].null_count
    names = ", ".join(f.name for f in folders)
    say(f"wrote {len(table)} rows ({attempts} attempts) of {names} to {path}")


def run_heatmap(
    source: str | None,
    output: Path | None,
    rank_by: str,
    include_suspects: bool,
    compared: str | None,
    as_json: bool,
    results: Path,
) -> None:
    """Draws, or prints, the best layout of each cell."""
    name, default, table = _open(source, results)
    cells = rank(table, rank_by=rank_by, include_suspects=include_suspects)
    label = None
    if compared is not None:
        label, _, others = _open(compared, results)
        cells = compare(cells, rank(others, rank_by=rank_by, include_suspects=include_suspects))
    if as_json:
        print_json([cell.to_json() for cell in cells])
    if as_json and output is None:
        return
    from ultrabench.analysis.heatmap import draw

    path = output or default
    draw(cells, path, title=name, notes=notes(table), compared_with=label)
    say(f"drew {len(cells)} cells to {path}")


def _open(source: str | None, results: Path) -> tuple[str, Path, pa.Table]:
    """Label, default picture and rows of a sweep or a parquet file."""
    if source is not None and source.endswith(".parquet"):
        path = Path(source)
        return path.stem, path.with_suffix(".png"), read_parquet(path)
    folder = find_sweep(source, results)
    return folder.name, folder.path / "heatmap.png", collect([folder], warn)
