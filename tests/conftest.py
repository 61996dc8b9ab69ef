"""Settings of hypothesis: the same examples on every machine; `--hypothesis-profile=hunt` looks further.

Configuration files are parsed once, and the same overrides are composed once.
"""

import gc
import os
import pickle
from collections.abc import Sequence
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
# Before any test imports torch or numpy: where processes share a core, threads that wait for each other by spinning
# took 40 times as long, and 20 times as much CPU time. Ranks get a number of threads of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from ultrabench.sweep.config import load as config_load  # noqa: E402
from ultrabench.sweep.config.files import search_path  # noqa: E402

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


compose_tree = config_load.compose_tree
trees = dict[tuple[str, ...], bytes]()
"""Overrides -> the pickled configuration that they compose from the files of the package; Hydra takes 50 ms for it."""


def compose_tree_once(overrides: Sequence[str]) -> dict[str, Any]:
    """What `compose_tree` gives, which is kept where the user has no configuration files; an error is made anew."""
    if len(search_path()) > 1:
        return compose_tree(overrides)
    if (key := (*overrides,)) not in trees:
        trees[key] = pickle.dumps(compose_tree(overrides))
    tree: dict[str, Any] = pickle.loads(trees[key])
    return tree


config_load.compose_tree = compose_tree_once


def pytest_collection_finish() -> None:
    """Spares the garbage collector the objects of imported modules, which live to the end."""
    gc.freeze()
