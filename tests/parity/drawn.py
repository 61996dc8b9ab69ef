"""Compares layouts drawn at random with one process in fp64: `python -m tests.parity.drawn 40 2026 [latent]`.

latent draws only layouts of models with latent attention.

It prints a line of JSON for each layout, then the largest differences, and exits with 1 when a layout differs.
"""

import json
import random
import sys
from dataclasses import asdict, replace

from tests.parity.conftest import Server
from tests.parity.test_layouts import CHANGES, MOE, STEPS, mla_shape
from ultrabench.errors import ConfigError
from ultrabench.kernel.check.parity import run_check
from ultrabench.kernel.requests import TINY, CheckSpec
from ultrabench.layout import Layout, default_virtual_stages
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.arguments import require_possible

MAX_RANKS = 8


def draw_latent_shape(pick: random.Random) -> ModelShape:
    """A model with latent attention, with and without experts, latents of queries, biases and tied tables."""
    words = [word for word in ("narrow", "dense") if pick.random() < 1 / 2]
    shape = mla_shape(words, pick.choice((2, 4)))
    return replace(shape, tie_word_embeddings=pick.random() < 1 / 3, vocab_size=pick.choice((256, 131)))


def draw(pick: random.Random, *, latent: bool = False) -> CheckSpec | None:
    """A check of a model that is changed in up to two ways, a third of them with experts,
    or None when it cannot run.
    """
    pp, tp = pick.choice((1, 1, 2, 4)), pick.choice((1, 1, 2, 4))
    schedule = pick.choice(("1f1b", "afab", "interleaved", "zbv")) if pp > 1 else "none"
    changes = [pick.choice(list(CHANGES.values())) for _ in range(pick.randint(0, 2))]
    try:
        shape = MOE if pick.random() < 1 / 3 else TINY
        for change in changes:
            shape = replace(shape, **change)
        if latent:
            shape = draw_latent_shape(pick)
        layout = Layout(
            dp=pick.choice((1, 2, 3, 4)), tp=tp, pp=pp, cp=pick.choice((1, 1, 2)), zero_stage=pick.choice((0, 1, 2, 3)),
            ep=pick.choice((1, 2, 4)) if shape.num_experts else 1, dp_shard=pick.choice((0, 0, 0, 2)),
            mbs=pick.choice((1, 2)), gas=pick.randint(1, 5), pp_schedule=schedule,
            virtual_stages=default_virtual_stages(schedule),
            recompute=pick.choice(("none", "none", "attention", "selective", "full", "every2")),
            sequence_parallel=pick.choice(("on", "on", "off")) if tp > 1 else "on",
            dp_overlap=pick.choice(("on", "on", "off")),
            cp_exchange=pick.choice(("ring", "allgather")),
        )  # fmt: skip
        routing = pick.choice(("balanced", "learned", "skew=1.2")) if shape.num_experts else "balanced"
        spec = CheckSpec(
            layout=layout, shape=shape, compile=pick.random() < 1 / 4, precision="fp64", steps=STEPS, routing=routing
        )  # fmt: skip
        require_possible(spec.run, "cpu")
    except ConfigError:
        return None
    return None if layout.world_size > MAX_RANKS else spec


def drawn_specs(number: int, pick: random.Random, *, latent: bool = False) -> list[CheckSpec]:
    """The first layouts of several ranks that are drawn and can run."""
    specs = list[CheckSpec]()
    while len(specs) < number:
        spec = draw(pick, latent=latent)
        specs += [spec] if spec and spec.layout.world_size > 1 else []
    return specs


def main() -> int:
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    pick, server = random.Random(seed), Server()
    specs = drawn_specs(number, pick, latent="latent" in sys.argv)
    failed, largest = list[str](), dict.fromkeys(("loss_diff", "grad_diff", "param_diff"), 0.0)
    for spec in specs:
        result = asdict(server.ask(run_check, spec))
        facts = {"layout": spec.layout.label(), "compile": spec.compile, "shape": asdict(spec.shape)}
        print(json.dumps(facts | result), flush=True)
        failed += [] if result["passed"] else [spec.layout.label()]
        largest = {name: max(value, result[name] or 0.0) for name, value in largest.items()}
    server.close()
    print(json.dumps({"seed": seed, "layouts": number, "failed": failed} | largest))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
