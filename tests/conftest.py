"""Settings of hypothesis: the same examples on every machine; `--hypothesis-profile=hunt` looks further.

Configuration files are parsed once.
"""

import gc
import os
import pickle
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, settings

# Machines that run tests are shared, so no example has a deadline.
settings.register_profile(
    "same", deadline=None, max_examples=25, derandomize=True, database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile("hunt", settings.get_profile("same"), max_examples=1000, derandomize=False)
settings.load_profile("same")


os.environ.setdefault("ULTRABENCH_MACHINE", f"tests of process {os.getpid()}")  # tests run beside each other
# Before any test imports torch or numpy: where processes share a core, threads that wait for each other by spinning took
# 40 times as long, and 20 times as much CPU time. Ranks get a number of threads of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


load, compose = yaml.load, yaml.compose
parsed = dict[tuple[str, str], bytes]()
"""Name of the loader and text -> the pickled values: tests compose the same few files a thousand times."""
nodes = dict[tuple[str, str], Any]()
"""The same -> the nodes, which nobody changes."""


def load_once(stream: Any, Loader: Any) -> Any:
    """What `yaml.load` gives; each text is parsed once, and an error is made anew."""
    text = stream if isinstance(stream, str | bytes) else stream.read()
    if (key := (Loader.__name__, text)) not in parsed:
        if text is not stream:
            stream.seek(0)  # errors name the file
        parsed[key] = pickle.dumps(load(stream, Loader))
    return pickle.loads(parsed[key])


def compose_once(text: str, Loader: Any) -> Any:
    """What `yaml.compose` gives."""
    if (key := (Loader.__name__, text)) not in nodes:
        nodes[key] = compose(text, Loader)
    return nodes[key]


yaml.load, yaml.compose = load_once, compose_once


def pytest_collection_finish() -> None:
    """Spares the garbage collector the objects of imported modules, which live to the end."""
    gc.freeze()
