"""Settings of hypothesis: the same examples on every machine; `--hypothesis-profile=hunt` looks further."""

import gc
import os

from hypothesis import HealthCheck, Phase, settings

# Machines that run tests are shared, so no example has a deadline.
settings.register_profile(
    "same", deadline=None, max_examples=25, derandomize=True, database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile("hunt", settings.get_profile("same"), max_examples=1000, derandomize=False)
settings.load_profile("same")


os.environ.setdefault("ULTRABENCH_MACHINE", f"tests of process {os.getpid()}")  # tests run beside each other


def pytest_collection_finish() -> None:
    """Spares the garbage collector the objects of imported modules, which live to the end."""
    gc.freeze()
