"""The fingerprint of a failure: equal wherever and whenever it happens, different for different failures."""

import pytest

from ultrabench.agent.diagnose.outcome import fingerprint

STACK = """Traceback (most recent call last):
  File "{root}/{name}", line {number}, in step
    loss = model(x)
  File "{root}/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 116, in forward
    return F.linear(input)
"""


def of(line="ValueError: x", cause="exception", phase="measure", root="/src/a", number=7, name="train.py"):
    stack = STACK.format(root=root, number=number, name=name)
    return fingerprint(cause, phase, line, stack, ("gpu03", "gpu04"))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Tried to allocate 2.00 GiB", "Tried to allocate 512.00 MiB", True),
        ("Connection closed by peer [10.0.0.7]:39851", "Connection closed by peer [10.0.1.12]:4711", True),
        ("rank 3: loss is nan at step 17", "rank 12: loss is nan at step 4", True),
        ("fault at 0x7f3e00a1", "fault at 0x55aa1234", True),
        ("cannot open /scratch/job17/gpu03/data.bin", "cannot open /scratch/job18/gpu04/data.bin", True),
        ("gpu03.cluster: bus error", "gpu04.cluster: bus error", True),
        ("took 1.5e-3 s in f3a9c01b77", "took 12 s in 0011aabbcc", True),
        ("KeyError: 'lr'", "KeyError: 'wd'", False),
        ("expected Float but found BFloat16", "expected Float but found Float8", False),
        ("cannot open /data/train.bin", "cannot open /data/valid.bin", False),
        ("libcudart.so.12: not found", "libnccl.so.2: not found", False),
    ],
)
def test_numbers_folders_and_hosts_do_not_count(one, other, equal):
    assert (of(one) == of(other)) == equal


def test_cause_phase_and_own_frames_count():
    assert of(root="/scratch/b", number=9) == of()
    assert len({of(), of(cause="assertion"), of(phase="build"), of(name="eval.py")}) == 4
