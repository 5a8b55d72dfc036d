"""The pool of killable processes: limits, replacement, order, and that nothing is left behind."""

import os
import subprocess
import sys
import time

import pytest

from jprm.errors import UserError
from jprm.tasks.sandbox import Sandbox

SERVICE = '''
import os, subprocess, sys, time

def service(scale):
    def call(item):
        if item == "loop":
            while True: pass
        if item == "tower":
            return 9 ** 9 ** 9 ** 9  # one C call that never gives the interpreter back
        if item == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(os.environ["CHILD_FILE"], "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        if item == "memory":
            return len(bytearray(8 << 30))
        if item == "pid":
            return os.getpid()
        if isinstance(item, bytes):
            return item[::-1]
        time.sleep(item % 3 / 50)
        return item * scale
    return call

def stubborn():
    os._exit(5)
'''


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    (folder / "sandbox_service.py").write_text(SERVICE)
    sys.path.insert(0, str(folder))
    yield "sandbox_service:service"
    sys.path.remove(str(folder))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_replies_keep_the_order_of_the_items(service):
    with Sandbox(service, (10,), workers=3) as box:
        assert [r.value for r in box.call(list(range(20)))] == [10 * i for i in range(20)]
        assert len(box.workers) == 3
        assert box.call([]) == []
        big = bytes(range(256)) * 40_000  # many times a pipe's buffer, both ways
        assert [r.value for r in box.call([big, big[:5]])] == [big[::-1], big[:5][::-1]]


def test_no_more_processes_than_items(service):
    with Sandbox(service, (1,), workers=3) as box:
        box.call([1])
        assert len(box.workers) == 1


def test_overruns_are_killed_and_replaced(service):
    with Sandbox(service, (1,), workers=2, timeout_s=0.5) as box:
        before = {r.value for r in box.call(["pid", "pid", "pid"])}
        replies = box.call(["loop", 1, "tower", 2, "loop", 4])
        assert [r.error for r in replies] == ["timeout", "", "timeout", "", "timeout", ""]
        assert [r.value for r in replies[1::2]] == [1, 2, 4] and box.killed == 3
        assert not any(map(alive, before))
        assert box.call([5])[0].value == 5


def test_whatever_a_call_started_dies_with_it(service, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "pid"))
    with Sandbox(service, (1,), workers=1, timeout_s=2.0) as box:
        assert box.call(["child"])[0].error == "timeout"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):  # the orphan is reaped by init in its own time
        if not alive(pid):
            break
        time.sleep(0.02)
    assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set on Linux only")
def test_memory_is_limited(service):
    with Sandbox(service, (1,), workers=1, memory_bytes=1 << 30) as box:
        reply = box.call(["memory", 3])
        assert reply[0].error == "raised" and "MemoryError" in reply[0].detail and reply[1].value == 3


def test_a_process_that_died_while_idle_is_nobodys_fault(service):
    with Sandbox(service, (1,), workers=1) as box:
        pid = box.call(["pid"])[0].value
        os.kill(pid, 9)
        while alive(pid):
            time.sleep(0.01)
        assert box.call([7])[0].value == 7


def test_closing_leaves_no_process(service):
    box = Sandbox(service, (1,), workers=2)
    pids = {r.value for r in box.call(["pid"] * 4)}
    box.close()
    assert pids and not any(map(alive, pids))
    assert box.call([3])[0].value == 3  # and it may be used again
    box.close()


def test_no_process_outlives_an_interpreter_that_forgets_to_close(service):
    script = (
        "import sys; sys.path.insert(0, {folder!r})\n"
        "from jprm.tasks.sandbox import Sandbox\n"
        "box = Sandbox('sandbox_service:service', (1,), workers=1)\n"
        "print(box.call(['pid'])[0].value)"
    ).format(folder=sys.path[0])
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    pid = int(out.stdout)
    for _ in range(200):
        if not alive(pid):
            break
        time.sleep(0.02)
    assert not alive(pid)


def test_a_process_that_cannot_start_is_an_error(service):
    with pytest.raises(UserError) as error:
        Sandbox("sandbox_service:stubborn").start()
    assert error.value.found == "a process that ended while it started, with exit status 5"
    assert error.value.where == "config.task.verifier" and error.value.fix


@pytest.mark.parametrize("key, kwargs", [("verifier_timeout_s", {"timeout_s": 0}), ("verifier_workers", {"workers": 0})])
def test_limits_must_be_positive(key, kwargs):
    with pytest.raises(UserError) as error:
        Sandbox("m:f", **kwargs)
    assert error.value.where == f"config.task.{key}" and error.value.found == f"{key} 0"


@pytest.mark.slow
def test_a_busy_process_does_not_outlive_a_parent_that_was_killed(service):
    script = (
        "import os, sys, threading, time; sys.path.insert(0, {folder!r})\n"
        "from jprm.tasks.sandbox import Sandbox\n"
        "box = Sandbox('sandbox_service:service', (1,), workers=1, timeout_s=1.0)\n"
        "print(box.call(['pid'])[0].value, flush=True)\n"
        "threading.Timer(0.5, os._exit, (0,)).start()\n"
        "box.call(['tower'])"
    ).format(folder=sys.path[0])
    # Not its standard error: the process shares that, and reading to its end would wait for what is to be watched.
    out = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    pid, deadline = int(out.stdout), time.monotonic() + 30
    assert alive(pid)
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)
