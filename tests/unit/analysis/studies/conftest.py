from tests.unit.cli.conftest import _elsewhere, sweep, ultrabench  # noqa: F401
