"""A user's program that trains nothing but calls collectives, and misbehaves before one of them.

python collective.py 1:BEHAVIOUR,2:BEHAVIOUR: by micro-batch size, sleep (the last rank never enters the sixth
all-reduce) or receive (it sends nothing to rank 0, which receives).
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from ultrabench.kernel.rank import stack_dump
from ultrabench.rank_report import Report


def lose_time(behaviour: str) -> None:
    time.sleep(1000)


with open(os.environ["ULTRABENCH_SPEC"]) as file:
    mbs = json.load(file)["spec"]["layout"]["mbs"]
behaviour = dict(word.split(":") for word in sys.argv[1].split(","))[str(mbs)]
report = Report.from_environment()
stack_dump.dump_on_signals(report)
dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
values = torch.ones(4)
for step in range(1, 13):
    begun = time.perf_counter()
    if behaviour == "sleep" and step == 6 and last:
        lose_time("before a collective")
    if behaviour == "receive" and step == 6 and (last or dist.get_rank() == 0):
        lose_time("before a send") if last else dist.recv(values, dist.get_world_size() - 1)
    dist.all_reduce(values)
    report.write("step", step=step, seconds=time.perf_counter() - begun, loss=1.0 / step)

report.write("done")
dist.destroy_process_group()
