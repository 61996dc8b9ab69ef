import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.launchers.slurm.launcher import inherited

NAMES = st.sampled_from(("PATH", "NCCL_ALGO", "HF_TOKEN")) | st.text("HFNCL_10", min_size=1, max_size=9)


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "SLURM_CONF", "NCCL_DEBUG",
     "NCCL_IB_HCA", "FI_PROVIDER", "UCX_TLS", "GLOO_SOCKET_IFNAME", "MODULEPATH", "LMOD_CMD", "CUDA_HOME",
     "BASH_ENV", "BASH_FUNC_module%%", "BASH_FUNC_module()", "BASH_FUNC_ml%%", "LOADEDMODULES", "_LMFILES_",
     "_ModuleTable001_", "__LMOD_REF_COUNT_PATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS",
     "TORCHINDUCTOR_MAX_AUTOTUNE", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FLASH_ATTN"],
)  # fmt: skip
def test_what_programs_need_goes_along(name):
    assert inherited({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "GITHUB_TOKEN", "SLURM_JOB_ID",
     "SLURM_NODEID", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "PYTHONPATH", "CUDA_VISIBLE_DEVICES",
     "LD_PRELOAD", "MY_PATH", "PATHS", "path", "XNCCL_DEBUG", "NCCL", "BASH_FUNC_ls%%", "SUBMITIT_LOCAL_GLOBALID"],
)  # fmt: skip
def test_everything_else_stays(name):
    assert inherited({name: "x"}) == {}


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        (["HF_TOKEN"], {"HF_TOKEN"}),
        (["HF_*"], {"HF_TOKEN", "HF_HOME"}),
        (["hf_*"], set()),
        (["HF"], set()),
        (["*"], {"HF_TOKEN", "HF_HOME", "SECRET"}),
        ([""], set()),
    ],
)
def test_further_names_are_taken_when_asked_for(more, taken):
    environ = dict.fromkeys(("HF_TOKEN", "HF_HOME", "SECRET"), "x")
    assert set(inherited(environ, more)) == taken


@given(environ=st.dictionaries(NAMES, st.text(max_size=5)), more=st.lists(NAMES, max_size=3))
def test_values_are_never_touched(environ, more):
    found = inherited(environ, more)
    assert found.items() <= environ.items()
    assert set(more) & set(environ) <= set(found)
    assert inherited(found, more) == found


def test_the_module_command_of_a_login_shell_works_in_a_job(tmp_path):
    """Sites define it as a function, which scripts get through the environment."""
    login = "module() { echo loaded $2; }; export -f module; env -0"
    told = subprocess.run(["bash", "-c", login], capture_output=True, text=True, check=True).stdout
    environ = dict(line.split("=", 1) for line in told.split("\0") if line)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nmodule load cuda\n")
    done = subprocess.run(
        ["bash", script], env=inherited(environ), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("loaded cuda\n", "")
