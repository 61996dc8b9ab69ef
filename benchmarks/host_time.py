"""Measures the host time of one eager decoder layer, forward and backward, at several degrees of tp.

    python benchmarks/host_time.py

One process acts as a rank of each world: nothing is sent, and the layer is so small that Python and torch's
dispatcher take nearly all of the time. On a GPU this time matters where it is longer than that of the kernels.
"""

import json
import time

import torch
import torch.distributed as dist
from timing import seconds_a_call
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrabench.kernel.dryrun.counts import CollectiveCounts
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.requests import CheckSpec
from ultrabench.kernel.step import TrainStep
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape

SHAPE = ModelShape(
    name="small", hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=8, vocab_size=128, tie_word_embeddings=False,
)  # fmt: skip
SEQ_LEN = 16
ROUNDS, TIMES = 15, 20


def seconds(tp: int, recompute: str) -> tuple[float, int]:
    """The lowest CPU seconds of one layer in ROUNDS rounds, forward and backward,
    and its number of collectives over tp.
    """
    layout = Layout(tp=tp, dp=1, recompute=recompute)
    spec = CheckSpec(layout=layout, shape=SHAPE, seq_len=SEQ_LEN, precision="fp32").run
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    trainer = TrainStep(spec, torch.device("cpu"), build_mesh(layout, "cpu"))
    (model,) = trainer.models
    model.unshard()
    layer = model.layers["0"]
    x_BsH = torch.randn(1, SEQ_LEN // tp, SHAPE.hidden_size, requires_grad=True)
    half = SHAPE.head_width // 2
    cos, sin = torch.ones(SEQ_LEN, 1, half), torch.zeros(SEQ_LEN, 1, half)

    def once() -> Tensor:
        out: Tensor = layer(x_BsH, cos, sin)
        out.backward(torch.ones_like(out))
        return out

    once()
    with CollectiveCounts(trainer.mesh, trainer.cp_group) as counts:
        once()
    times_s = seconds_a_call(once, TIMES, ROUNDS, time.process_time)
    dist.destroy_process_group()
    return min(times_s), sum(
        n for key, (n, _) in counts.calls_and_bytes.items() if key.startswith("tp ") and tp > 1
    )


def main() -> None:
    torch.set_num_threads(1)
    for recompute in ("none", "attention", "selective", "full"):
        base, _ = seconds(1, recompute)
        for tp in (1, 2, 8):
            layer_s, collectives = seconds(tp, recompute)
            row = {"recompute": recompute, "tp": tp, "ms": round(1e3 * layer_s, 3), "to_tp1": round(layer_s / base, 2),
                   "collectives": collectives}  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
