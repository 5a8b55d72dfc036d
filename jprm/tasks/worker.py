"""The inside of a sandbox process: read a call, answer it, until the stream ends. Started by `jprm.tasks.sandbox` only."""

import importlib
import math
import pickle
import signal
import socket
import sys
import traceback
from typing import Any

from jprm.errors import UserError

ORPHAN_GRACE_S = 5


def serve(descriptor: int) -> None:
    """Answers calls on the inherited socket until the parent closes it."""
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    # A Ctrl-C at the terminal is for the parent, which ends us in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    factory, arguments, memory_bytes = _receive(stream)
    try:
        _limit_memory(memory_bytes)
        module, _, name = factory.partition(":")
        function = getattr(importlib.import_module(module), name)(*arguments)
    except UserError as error:
        return _send(stream, ("user_error", (error.found, error.expected, error.where, error.fix)))
    except BaseException:
        return _send(stream, ("failed", traceback.format_exc()))
    _send(stream, ("ready", None))
    while True:
        try:
            item, timeout_s = _receive(stream)
        except EOFError:
            return
        # The parent kills us at the limit. If it was killed itself there is nobody to do so: then the kernel's alarm does, whose
        # default action needs no cooperation from a busy interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout_s) + ORPHAN_GRACE_S)
        answer = _answer(function, item)
        signal.alarm(0)
        try:
            _send(stream, answer)
        except BrokenPipeError:
            return


def _answer(function: Any, item: Any) -> tuple[str, Any]:
    try:
        return "value", function(item)
    except UserError as error:
        return "user_error", (error.found, error.expected, error.where, error.fix)
    except BaseException:  # SystemExit too: a verifier that calls exit() has raised, not ended the run
        return "raised", traceback.format_exc()


def _limit_memory(memory_bytes: int) -> None:
    if memory_bytes and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _receive(stream: Any) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(header)))


def _send(stream: Any, message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(len(body).to_bytes(8) + body)
    stream.flush()
