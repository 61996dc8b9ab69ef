import pytest

from ultrabench.agent.diagnose.root_cause import fingerprint, normalized

STACK = """Traceback (most recent call last):
  File "{root}/train.py", line {line}, in step
    loss = model(x)
  File "{root}/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 116, in forward
    return F.linear(input)
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Tried to allocate 2.00 GiB", "Tried to allocate 512.00 MiB"),
        ("Connection closed by peer [10.0.0.7]:39851", "Connection closed by peer [10.0.1.12]:4711"),
        ("rank 3: loss is nan at step 17", "rank 12: loss is nan at step 4"),
        ("fault at 0x7f3e00a1", "fault at 0x55aa1234"),
        ("cannot open /scratch/job17/gpu03/data.bin", "cannot open /scratch/job18/gpu04/data.bin"),
        ("gpu03.cluster: bus error", "gpu04.cluster: bus error"),
        ("took 1.5e-3 s in f3a9c01b77", "took 12 s in 0011aabbcc"),
    ],
)
def test_what_differs_from_place_to_place_does_not_count(one, other):
    hosts = ("gpu03", "gpu04")
    assert normalized(one, hosts) == normalized(other, hosts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 'lr'", "KeyError: 'wd'"),
        ("expected Float but found BFloat16", "expected Float but found Float8"),
        ("cannot open /data/train.bin", "cannot open /data/valid.bin"),
        ("libcudart.so.12: not found", "libnccl.so.2: not found"),
    ],
)
def test_different_faults_differ(one, other):
    assert normalized(one, ()) != normalized(other, ())


def test_cause_phase_and_own_frames_count():
    def of(
        cause="exception", phase="measure", line="ValueError: x", root="/src/a", number=7, name="train.py"
    ):
        stack = STACK.format(root=root, line=number).replace("train.py", name)
        return fingerprint(cause, phase, line, stack, ())

    same = of()
    assert of(root="/scratch/b", number=9) == same
    assert len({same, of(cause="assertion"), of(phase="build"), of(name="eval.py")}) == 4
