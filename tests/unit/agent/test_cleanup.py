"""What a run or a dead agent leaves behind is gone before the next one begins: real processes, files and ports."""

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from textwrap import dedent

import pytest

from tests.patience import Deadline, wait_until
from ultrabench import processes
from ultrabench.agent.ranks.cleanup import SHARED_MEMORY_FOLDER, SharedMemoryCleanup

ROOT = Path(__file__).parents[3]
PRELUDE = """
import json, os, signal, subprocess, sys, time
def here():
    open(f"pids/{os.getpid()}", "w").close()
    time.sleep(1000)
def child(code, **words):
    subprocess.Popen([sys.executable, "-c", PRELUDE + code], **words)
"""
IGNORES = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\n"
ORPHAN = "os.fork() and os._exit(0)\nos.setsid()\nos.fork() and os._exit(0)\n"
FROZEN = "open(f'pids/{os.getpid()}', 'w').close()\nos.kill(os.getpid(), signal.SIGSTOP)\n"


class OneNode:
    """A node whose rank runs some code."""

    def __init__(self, folder, code, *device):
        self.pids, program = folder / "pids", folder / "program.py"
        self.pids.mkdir()
        program.write_text(f"{PRELUDE}\nPRELUDE = {PRELUDE!r}\n{dedent(code)}")
        words = [sys.executable, "-m", "tests.unit.agent.one_node", str(folder), str(program), *device]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def wait_for(self, count):
        """Pids of so many processes of the run, with their start times."""
        wait_until(lambda: len(list(self.pids.iterdir())) >= count or self._process.poll() is not None, 20)
        assert self._process.poll() is None
        return {int(p.name): processes.start_time(int(p.name)) or 0 for p in self.pids.iterdir()}

    def ask(self, expression):
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture
def one_node(tmp_path):
    with ExitStack() as stack:
        yield lambda code: stack.enter_context(closing(OneNode(tmp_path, code)))


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("child('here()', start_new_session=True); here()", 2),
        (f"child({ORPHAN + IGNORES + 'here()'!r}, env={{}}); here()", 2),
        (f"child({ORPHAN + 'here()'!r}); os._exit(0)", 1),
        (f"child({FROZEN!r}); here()", 2),
        ("os.fork(); os.fork(); os.fork(); here()", 8),
    ],
    ids=["session", "deaf without a tag", "rank gone", "stopped", "family"],
)
def test_every_process_of_a_run_ends_and_the_fork_server_stays(one_node, code, count):
    node = one_node(code)
    family = node.wait_for(count)
    server = node.ask("node._fork_server.pid")
    assert not node.ask("'pynvml' in __import__('sys').modules"), "it is needed on GPUs only"
    assert node.ask("node.kill()")["complaint"] is None
    assert [pid for pid, started in family.items() if processes.is_alive(pid, started)] == []
    assert processes.start_time(server) is not None


def test_children_that_fork_and_leave_all_the_time_end_for_good(one_node):
    """Each lives two milliseconds, in a session of its own, and its parent is gone by then."""
    node = one_node(
        """
        for chain in range(6):
            if os.fork() == 0:
                while True:
                    os.fork() and os._exit(0)
                    os.setsid()
                    os.fork() and os._exit(0)
                    with open(os.path.abspath(f"alive{chain}"), "w") as file:
                        file.write(str(time.time()))
                    time.sleep(0.002)
        here()
        """
    )
    node.wait_for(1)
    folder = node.pids.parent
    wait_until(lambda: len(list(folder.glob("alive*"))) == 6, 20)
    assert node.ask("node.kill()")["complaint"] is None
    ended = time.time()
    time.sleep(0.5)
    # Whoever lived would have written since.
    assert max(path.stat().st_mtime for path in folder.glob("alive*")) < ended


def test_a_report_that_ends_late_is_heard_before_the_exit(one_node):
    node = one_node("""
        with open(os.environ["ULTRABENCH_REPORT"], "w") as report:
            report.writelines(['{"event": "step", "seconds": 0.5}\\n'] * 100_000 + ['{"event": "done"}\\n'])
        open(f"pids/{os.getpid()}", "w").close()
    """)
    node.wait_for(1)
    heard, deadline = [], Deadline(30)
    while not heard or "code" not in heard[-1]:
        assert not deadline.over()
        rank_events = node.ask("node.rank_events()")
        assert len(rank_events) < 50_000
        heard += rank_events
    assert [len(heard), heard[-2]["line"], heard[-1]["code"]] == [100_002, {"event": "done"}, 0]


def test_what_a_run_leaves_is_removed_and_its_logs_are_kept_with_both_ends(one_node):
    name, foreign = f"nccl-test-{os.getpid()}", f"torch_test_{os.getpid()}"
    node = one_node(f"""
        import socket
        open("/dev/shm/{name}", "wb").write(b"x" * 4096)
        server = socket.create_server(("127.0.0.1", 0))
        open("port", "w").write(str(server.getsockname()[1]))
        print("first", *["x" * 2**20] * 40, "last", sep="\\n", flush=True)
        child("here()", pass_fds=[server.fileno()])
        here()
    """)
    node.wait_for(2)
    folder, scratch = node.pids.parent, Path(node.ask("str(node.scratch)"))
    assert len([p for p in scratch.iterdir() if p.is_dir()]) == 1
    with (SHARED_MEMORY_FOLDER / foreign).open("wb"):  # somebody else's, in use
        node.ask("node.kill()")
        assert node.ask("node.finish(keep_all=True).problem") is None
        assert not (SHARED_MEMORY_FOLDER / name).exists()
        assert (SHARED_MEMORY_FOLDER / foreign).exists()
    (SHARED_MEMORY_FOLDER / foreign).unlink()
    socket.create_server(("127.0.0.1", int((folder / "port").read_text()))).close()
    assert [p for p in scratch.iterdir() if p.is_dir()] == []
    (log,) = folder.glob("logs/*/0.0/rank0.log")
    text = log.read_text()
    assert len(text) < 4.01 * 2**20
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    left_out = re.search(r"\n--- ultrabench left out (\d+) bytes here ---\n", text)
    assert int(left_out[1]) + len(text) - len(left_out[0]) == len("first\nlast\n") + 40 * (2**20 + 1)


def test_only_new_unused_files_with_a_known_name_are_removed(tmp_path):
    assert SharedMemoryCleanup(tmp_path / "none").remove() == []
    (tmp_path / "torch_old").write_text("from before")
    (tmp_path / "torch_kept").write_text("from before")
    leftovers = SharedMemoryCleanup(tmp_path)
    (tmp_path / "torch_old").rename(tmp_path / "kept")
    for name in ("sem.new", "torch_new", "data.bin", "torch_old"):
        (tmp_path / name).write_text("x")
    with (tmp_path / "torch_new").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    assert leftovers.remove() == ["sem.new", "torch_old"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.bin", "kept", "torch_kept", "torch_new"]
    mapped.close()
    assert leftovers.remove() == ["torch_new"]


def test_a_container_is_a_namespace_of_its_own_and_a_foreign_proc_is_refused():
    code = "from ultrabench.processes import pid_namespace; print(pid_namespace())"
    inside, foreign = (
        subprocess.run(
            ["unshare", "--pid", *words, sys.executable, "-c", code], capture_output=True, text=True
        )
        for words in (("--fork", "--mount-proc"), ("--fork",))
    )
    if "unshare" in inside.stderr:
        pytest.skip("this user may not make PID namespaces")
    assert int(inside.stdout) != processes.pid_namespace()
    assert "ClusterError: /proc shows another PID namespace" in foreign.stderr


def test_only_what_the_dead_of_this_namespace_left_is_cleaned_up(tmp_path, monkeypatch):
    """Agents in and outside a container share the folder for temporary files, and one sees the other's processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = processes.own_tag("a", 0)
    namespace = alive.rpartition(":")[2]
    tags = [f"a:0:{dead.pid}:1:{namespace}", f"a:0:{dead.pid}:1:{int(namespace) + 1}", alive]
    folders = [tmp_path / f"ultrabench-{'-'.join(tag.split(':')[2:])}-abc" for tag in tags]
    for folder in folders:
        folder.mkdir()
    environments = [{**os.environ, processes.TAG_VARIABLE: tag} for tag in tags]
    ranks = [subprocess.Popen(["sleep", "1000"], env=environment) for environment in environments]
    processes.clean_up_after_the_dead()
    assert ranks[0].wait(10) < 0
    assert [rank.poll() for rank in ranks[1:]] == [None, None]
    assert [folder.exists() for folder in folders] == [False, True, True]
    for rank in ranks[1:]:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("tag", ["", "a:0:1:1", "a:0:x:1:1", "a:0:1:1:1:1", f"a:0:1:1:{2**63}"])
def test_a_tag_of_another_form_is_nobodys_orphan(tag):
    assert not processes.is_orphaned(tag)
