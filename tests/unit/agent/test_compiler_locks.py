"""Which locks of compilers hold up a program, or were left by one."""

import fcntl

import pytest

from ultrabench.agent.ranks.compiler_locks import compiler_locks, locks_text


@pytest.fixture
def env(tmp_path):
    """Variables of a program whose home and caches are empty."""
    return {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "USER": "ann"}


def lock(folder, path, text=""):
    (file := folder / path).parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("place", ["variable", "XDG_CACHE_HOME", "home"])
def test_the_lock_of_an_extension_holds_up_programs_as_long_as_it_exists(env, tmp_path, place):
    path = {"variable": "build/fused_adam/lock", "XDG_CACHE_HOME": "cache/torch_extensions/py311_cpu/fused_adam/lock",
            "home": "home/.cache/torch_extensions/py311_cpu/fused_adam/lock"}[place]  # fmt: skip
    env |= {"variable": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "build")}, "home": {},
            "XDG_CACHE_HOME": {"XDG_CACHE_HOME": str(tmp_path / "cache")}}[place]  # fmt: skip
    assert compiler_locks(env) == []
    file = lock(tmp_path, path)
    assert compiler_locks(env) == [str(file)]
    assert f"locks of compilers, which exist: {file}; if nothing compiles now" in locks_text([str(file)])


def test_a_lock_of_linux_holds_up_programs_only_while_a_process_has_it(env, tmp_path):
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    lock(tmp_path, "tmp/torchinductor_ann/locks/a.lock"), lock(tmp_path, "jax/.lockfile")
    held = lock(tmp_path, "triton/b.lock")
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert compiler_locks(env) == [str(held)]
    assert compiler_locks(env) == []
    by_existence = lock(tmp_path, "tmp/torchinductor_ann/locks/c.lock", "4711\nnode7\n")
    assert compiler_locks(env) == [str(by_existence)]
    assert "/3 and 2 more" in locks_text([f"/{n}" for n in range(1, 6)])
