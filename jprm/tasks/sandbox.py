"""The one place where code that may hang runs: a pool of processes that can be killed.

A time-out by thread, signal or coroutine cannot stop a C loop that never gives the interpreter back (a power tower in a computer
algebra system does that), so each call runs in another process and an overrun is answered with SIGKILL and a new process. The
processes are fresh interpreters, never forks: a fork of a process that runs JAX may inherit a held lock.
"""

import atexit
import collections
import dataclasses
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from jprm.errors import UserError

log = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # imports of a user's module, on a busy machine
HEADER = struct.Struct("!Q")  # a message is its length, then its pickle
_LIVE: "weakref.WeakSet[Sandbox]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of one call.

    Attributes:
      value: what the function returned; None unless `error` is empty.
      error: "" | "timeout" (killed at the wall limit) | "crashed" (the process died by itself) | "raised".
      detail: the traceback of a call that raised, the exit status of one that crashed.
    """

    value: Any = None
    error: str = ""
    detail: str = ""


class _Worker:
    """One process and the socket to it. States: starting -> idle -> busy -> idle ...; a dead one is replaced."""

    def __init__(self, sandbox: "Sandbox"):
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "JAX_PLATFORMS": "cpu",  # a user's verifier that imports JAX must not claim the accelerator
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from jprm.tasks.worker import serve; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if _has_descriptor(sys.__stderr__) else subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # its own process group, so that whatever it starts dies with it
        )
        theirs.close()
        ours.setblocking(False)
        self.socket, self.outgoing, self.incoming = ours, bytearray(), bytearray()
        self.job: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self.send((sandbox.factory, sandbox.arguments, sandbox.memory_bytes))

    def send(self, message: Any) -> None:
        body = pickle.dumps(message)
        self.outgoing += HEADER.pack(len(body)) + body

    def write(self) -> None:
        try:
            del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass

    def read(self) -> list[Any]:
        """The messages that are complete by now. Raises EOFError when the process is gone."""
        try:
            chunk = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self.incoming += chunk
        messages = []
        while len(self.incoming) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self.incoming)[0]
            if len(self.incoming) < end:
                break
            messages.append(pickle.loads(self.incoming[HEADER.size : end]))
            del self.incoming[:end]
        return messages

    def kill(self) -> int:
        """Ends the process and all it started; returns the exit status."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.socket.close()
        return self.process.wait()


class Sandbox:
    """Runs a function in killable processes.

    The processes start at the first call, serve many calls, and are replaced one by one as they overrun or die. They end when the
    sandbox is closed or the interpreter exits; should this process be killed, each ends at the end of its stream or, if busy, by
    an alarm a few seconds after its wall limit.

    Args:
      factory: "module:function"; called once in each process with `arguments`, it returns the function that serves the calls.
      arguments: what the factory gets; must pickle.
      timeout_s: wall limit of one call in seconds, start-up not included.
      workers: number of processes at most.
      where: the config key that errors in the factory are reported under.
      memory_bytes: limit on the data of each process (Linux; 0 for none). Beyond it a call raises MemoryError.

    Example:
      >>> with Sandbox("jprm.tasks.verifiers:math_verify_call", timeout_s=5.0, workers=2) as box:   # doctest: +SKIP
      ...     box.call([("1/2", r"\\boxed{0.5}"), ("1", "9^9^9^9^9")])
      [Reply(value=1.0, error='', detail=''), Reply(value=None, error='timeout', detail='')]
    """

    def __init__(
        self,
        factory: str,
        arguments: tuple = (),
        *,
        timeout_s: float = 5.0,
        workers: int = 2,
        where: str = "config.task.verifier",
        memory_bytes: int = 4 << 30,
    ):
        for value, key in ((timeout_s, "verifier_timeout_s"), (workers, "verifier_workers")):
            if not value > 0:
                raise UserError(f"{key} {value!r}", expected="more than 0", where=f"config.task.{key}", fix="Set it to 2")
        self.factory, self.arguments, self.timeout_s, self.size = factory, arguments, timeout_s, workers
        self.where, self.memory_bytes = where, memory_bytes
        self.workers: list[_Worker] = []
        self.lock = threading.Lock()  # one call at a time; a second thread waits
        self.killed = 0  # processes killed at the wall limit so far
        _LIVE.add(self)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Starts one process and waits until its function is loaded, so that a function that cannot be is known at once."""
        self.call([], at_least=1)

    def call(self, items: Sequence[Any], *, at_least: int = 0) -> list[Reply]:
        """The function on each item, several at a time; replies in the order of the items.

        Raises:
          UserError: the factory failed, a process could not start in time, or the function itself raised a UserError.
        """
        with self.lock:
            return self._call(items, at_least)

    def _call(self, items: Sequence[Any], at_least: int) -> list[Reply]:
        waiting = collections.deque(enumerate(items))
        replies: list[Reply | None] = [None] * len(items)
        done = 0
        # A process may have died while idle (the machine's memory watchdog, say): nobody's call, so nobody's fault.
        self._drop([worker for worker in self.workers if worker.process.poll() is not None])
        try:
            while done < len(items) or (at_least and not any(worker.ready for worker in self.workers)):
                while len(self.workers) < min(self.size, max(len(items) - done, at_least)):
                    self.workers.append(_Worker(self))
                for worker in self.workers:
                    if worker.ready and worker.job is None and waiting:
                        worker.job, item = waiting.popleft()
                        worker.send((item, self.timeout_s))
                        worker.deadline = time.monotonic() + self.timeout_s
                for worker, messages, gone in self._wait():
                    for message in messages:
                        done += self._take(worker, message, replies)
                    late = time.monotonic() > worker.deadline and (worker.job is not None or not worker.ready)
                    if not gone and not late:
                        continue
                    status = self._drop([worker])
                    if not worker.ready:
                        self._could_not_start(status if gone else None)
                    if worker.job is not None:
                        crashed = Reply(error="crashed", detail=f"exit status {status}")
                        replies[worker.job] = crashed if gone else Reply(error="timeout")
                        self.killed += not gone
                        done += 1
        except BaseException:
            self.close()  # an interrupt must not leave replies of this call to be read by the next
            raise
        return replies

    def _wait(self) -> list[tuple[_Worker, list[Any], bool]]:
        """Moves bytes until something happens or the next deadline: (worker, its messages, whether it is gone) for each."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
                selector.register(worker.socket, events, worker)
            active = [worker.deadline for worker in self.workers if worker.job is not None or not worker.ready]
            happened = selector.select(max(0.0, min(active, default=0.0) - time.monotonic()) + 0.001)
        events = {key.data: mask for key, mask in happened}
        result = []
        for worker in list(self.workers):
            messages, gone = [], False
            try:
                if events.get(worker, 0) & selectors.EVENT_WRITE:
                    worker.write()
                if events.get(worker, 0) & selectors.EVENT_READ:
                    messages = worker.read()
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                gone = True
            result.append((worker, messages, gone))
        return result

    def _take(self, worker: _Worker, message: tuple[str, Any], replies: list[Reply | None]) -> int:
        kind, content = message
        if kind == "user_error":
            found, expected, where, fix = content
            raise UserError(found, expected=expected, where=where, fix=fix)
        if kind == "ready":
            worker.ready = True
            return 0
        if kind == "failed":
            last = content.strip().splitlines()[-1]
            log.error("the verifier could not be loaded:\n%s", content)
            raise UserError(
                last, expected="a function that loads", where=self.where, fix="Mend the import; its traceback is in the log"
            )
        replies[worker.job] = Reply(value=content) if kind == "value" else Reply(error="raised", detail=content)
        worker.job = None
        return 1

    def _could_not_start(self, status: int | None) -> None:
        ended = f"a process that ended while it started, with exit status {status}"
        raise UserError(
            "no answer in time" if status is None else ended,
            expected=f"the function loaded within {START_LIMIT_S:.0f} s",
            where=self.where,
            fix="Make the module importable without side effects",
        )

    def _drop(self, workers: list[_Worker]) -> int:
        status = 0
        for worker in workers:
            self.workers.remove(worker)
            status = worker.kill()
        return status

    def close(self) -> None:
        """Ends all processes. The sandbox may be used again: they start anew."""
        self._drop(list(self.workers))


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


@atexit.register
def close_all() -> None:
    """Ends every process of every sandbox (at exit, and for tests)."""
    for sandbox in list(_LIVE):
        sandbox.close()
