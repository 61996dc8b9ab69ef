"""A data-parallel training program that torchrun starts and that only prints its steps, as many programs do.

torchrun --nproc_per_node=2 train.py --batch-size 1 --accumulate 4 --steps 10
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
for name in ("batch-size", "accumulate", "steps", "layers", "width", "vocabulary", "tokens"):
    parser.add_argument(f"--{name}", type=int, default=4)
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

torch.manual_seed(0)  # equal initial weights on all ranks, whatever the layout
width, vocabulary = arguments.width, arguments.vocabulary
layers = (
    layer for _ in range(arguments.layers) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
)
model = torch.nn.Sequential(
    torch.nn.Embedding(vocabulary, width), *layers, torch.nn.Linear(width, vocabulary)
)
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())
for step in range(1, arguments.steps + 1):
    start = time.perf_counter()
    for micro_batch in range(1, arguments.accumulate + 1):
        tokens = torch.randint(vocabulary, (arguments.batch_size, arguments.tokens + 1), device=device)
        model.require_backward_grad_sync = micro_batch == arguments.accumulate
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss / arguments.accumulate).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - start
        print(f"step {step}: loss {loss.item():.4f}, {1e3 * seconds:.2f} ms", flush=True)
dist.destroy_process_group()
