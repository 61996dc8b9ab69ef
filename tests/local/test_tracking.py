"""`launcher.track` on a real sweep, with a tracker that fails."""


def test_a_broken_tracker_leaves_the_sweep_alone(bench, monkeypatch):
    fake = bench.folder / "fake"
    fake.mkdir()
    (fake / "wandb.py").write_text(
        "Settings = dict\ndef init(**options):\n    raise OSError('no such host')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(fake))
    launched = bench.done(*bench.launch("ok", "launcher.track=wandb", mbs=[1, 2], gbs=4))
    assert launched.returncode == 0, launched.stderr
    assert [row["status"] for row in bench.rows()] == ["ok", "ok"]
    assert "wandb: no such host); to add them: ultrabench export wandb t\n" in launched.stderr
