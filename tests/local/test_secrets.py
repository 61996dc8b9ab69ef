"""A token that a program needs is seen by the program and by nobody who reads the results folder."""

import json
import subprocess

from tests.local.conftest import PEAK

PROGRAM = """
import json, os, sys
open(sys.argv[1], "a").write(f"{os.environ['HF_TOKEN']} {os.environ['PLAIN']}\\n")
assert "hunter2" not in open(os.environ["ULTRABENCH_SPEC"]).read()
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
if os.path.exists(sys.argv[1] + ".fail"):
    sys.exit("planted failure")
for step in range(12):
    print(json.dumps({"event": "step", "seconds": 0.01}), file=report)
print(json.dumps({"event": "done"}), file=report)
"""


def holders(bench):
    """Files of the results folder that hold the secret."""
    done = subprocess.run(
        ["grep", "-rl", "hunter2", bench.folder / "results"], capture_output=True, text=True
    )
    return done.stdout.split()


def test_a_secret_reaches_the_program_and_one_private_file_only(bench):
    (bench.folder / "program.py").write_text(PROGRAM)
    seen, fail = bench.folder / "seen", bench.folder / "seen.fail"
    fail.touch()
    words = [
        "kernel=command", "kernel.command=[python,program.py,seen]", "model=tiny", "name=t", "sweep.tp=1", "sweep.pp=1",
        "sweep.nodes=[1]", "sweep.gbs=2", "sweep.mbs=[1]", "sweep.gas=[1]", "sweep.zero_stage=[0]", "measure=quick",
        "measure.warmup_steps=2", "measure.min_steps=6", "launcher.preflight=false", "retry.backoff_s=0", PEAK,
    ]  # fmt: skip
    env = "kernel.env={HF_TOKEN: hunter2-very-secret, PLAIN: shown}"
    private = bench.folder / "results/t/allocations/secrets.json"
    bench.run("sweep", "launch", *words, env, code=1)
    assert set(seen.read_text().splitlines()) == {"hunter2-very-secret shown"}
    assert holders(bench) == [str(private)]
    assert private.stat().st_mode & 0o777 == 0o600
    head = json.loads((bench.folder / "results/t/sweep.json").read_text())
    assert head["kernel"]["env"] == {"HF_TOKEN": "<redacted>", "PLAIN": "shown"}
    assert "kernel.env={HF_TOKEN: '<redacted>', PLAIN: shown}" in head["provenance"]["argv"]

    fail.unlink()
    before = len(seen.read_text().splitlines())
    bench.run("sweep", "retry", "t")  # finds the value again
    assert set(seen.read_text().splitlines()[before:]) == {"hunter2-very-secret shown"}
    bench.run("sweep", "launch", *words, "kernel.env={HF_TOKEN: '<redacted>', PLAIN: shown}")
    bench.run(
        "sweep", "launch", *words, env.replace("hunter2", "hunter2-renewed")
    )  # the same sweep, the same results
    assert "hunter2-renewed-very-secret" in private.read_text()
    private.unlink()
    for command in (
        ["sweep", "show", bench.rows()[0]["run_id"], "--json"],
        ["sweep", "plan", *words, env, "--json"],
    ):
        assert "hunter2" not in bench.run(*command)
    assert holders(bench) == []
