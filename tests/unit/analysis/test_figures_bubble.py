from tests.unit.analysis.tables import PIPELINES as RUNS  # noqa: F401
