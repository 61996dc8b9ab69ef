"""A training program that reads its settings from a JSON file and writes a log.

In this folder: ultrabench sweep launch kernel=config_file name=config-file
"""

import json
import os
import random
import sys
import time

config = json.load(open(sys.argv[1]))
rank, is_first = int(os.environ["RANK"]), os.environ["RANK"] == "0"
training, samples = config["training"], random.Random(config["training"]["seed"] + rank)
weights = [0.0] * config["model"]["hidden_size"]
for step in range(1, training["steps"] + 1):
    start, loss, gradient = time.perf_counter(), 0.0, [0.0] * len(weights)
    for _ in range(training["samples_per_rank"]):  # your training step
        inputs = [samples.gauss(0, 1) for _ in weights]
        error = sum(w * x for w, x in zip(weights, inputs, strict=True)) - sum(inputs)
        loss += error**2 / training["samples_per_rank"]
        gradient = [
            g + error * x / training["samples_per_rank"] for g, x in zip(gradient, inputs, strict=True)
        ]
    weights = [w - 0.01 * g for w, g in zip(weights, gradient, strict=True)]
    if is_first:
        print(
            f"step {step} of {training['steps']}: {time.perf_counter() - start:.6f} s, loss {loss:.4f}",
            flush=True,
        )
