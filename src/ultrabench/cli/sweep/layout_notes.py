"""Lines below the tables of predicted layouts, which say what the numbers in their columns include."""

from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.numbers import formula_text
from ultrabench.sweep.config.sweep_config import SweepConfig


def layout_notes(config: SweepConfig) -> dict[str, str]:
    """Heading of a column -> what it includes, for the columns that `sweep plan` and `recommend` share."""
    has_experts = any(shape.num_experts for shape in config.models)
    mfu_heading, oom_heading = column_of("mfu").heading, column_of("p_oom").heading
    step_heading, peak_heading = (
        column_of(name).bare_heading for name in ("step_time_s", "predicted_peak_mem_bytes")
    )
    return {
        mfu_heading: formula_text([config.measure.flops_formula], has_experts),
        step_heading: "in brackets: 80 % intervals",
        peak_heading: f"{peak_heading}: includes the allocator's reserve",
        oom_heading: f"{oom_heading}: without the allocator's reserve, which a full GPU gets back",
    }
