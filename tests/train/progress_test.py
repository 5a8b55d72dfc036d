"""A bar on a terminal, lines elsewhere, nothing on other processes.

Seen to fail: without the last-iteration clause, with the compiling iteration in the rate, with tqdm asked for a size of 0.
"""

import io
import os
import pty
import re
import select
import termios
import time

import jax
import pytest

from jprm.train.progress import Progress, duration, number

METRICS, TIMINGS = (
    {"acc": 0.41, "prm auc": 0.63},
    {"timing_s/gen": 0.6, "timing_s/verify": 0.0, "timing_s/step": 0.7, "timing_s/iteration": 1.3},
)


@pytest.fixture
def clock(monkeypatch):
    """time.monotonic that moves only when told."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def run(file, clock, total=80, done=0, steps=range(1, 81), seconds=1.3, **options):
    with Progress(file=file, **options) as progress:
        progress.start("rl", total=total, done=done)
        for step in steps:
            clock[0] += 60 if step == done + 1 else seconds  # the first one compiles
            progress.update(step, METRICS, TIMINGS)


def test_a_plain_line(clock):
    out = io.StringIO()
    run(out, clock, done=10, steps=[11, 12], interval_s=0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "rl 11/80  acc .41  prm auc .63  gen .6 verify .0 step .7"
    assert lines[1] == "rl 12/80  acc .41  prm auc .63  1.30 s/it  ETA 1m28s  gen .6 verify .0 step .7"


@pytest.mark.parametrize("interval_s, printed", [(26, [1, 21, 41, 61, 80]), (1e9, [1, 80])])
def test_how_often(clock, interval_s, printed):
    out = io.StringIO()
    run(out, clock, interval_s=interval_s)
    assert [int(n) for n in re.findall(r"^rl (\d+)/80", out.getvalue(), re.M)] == printed
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


def read_until(descriptor: int, end: str) -> str:
    """What stands in a terminal's buffer up to and with ``end``; one read may return only a part of it."""
    text = b""
    while end.encode() not in text and select.select([descriptor], [], [], 10)[0]:
        text += os.read(descriptor, 1 << 16)
    return text.decode()


@pytest.mark.parametrize("size", [(40, 140), (0, 140), (0, 0)], ids=str)
def test_a_bar_on_a_terminal(size):
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, size)
    with open(follower, "w") as terminal:
        with Progress(file=terminal) as progress:
            progress.start("rl", total=3)
            for step in (1, 2, 3):
                progress.update(step, METRICS, TIMINGS)
            progress.say("evaluated: accuracy .44")
            progress.start("eval", total=1)
        text = read_until(leader, "eval 0/1")
    os.close(leader)
    last = re.findall(r"rl 3/3 \|█+\|  acc[^\r\n]*", text)[-1]
    assert "acc .41  prm auc .63" in last and "s/it" in last and "ETA 0s" in last and "gen .6 verify .0 step .7" in last
    assert "evaluated: accuracy .44\r\n" in text and "eval 0/1" in text


def test_other_processes_are_silent(clock, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    out = io.StringIO()
    run(out, clock, interval_s=0)
    with Progress(file=out) as progress:
        progress.say("hello")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    "value, text",
    [
        (0.41, ".41"),
        (-0.4, "-.40"),
        (1.306, "1.31"),
        (10.0, "10.00"),
        (123.4, "123"),
        (0, ".00"),
        (3.2e-5, "3.2e-05"),
        (float("nan"), "non-finite"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (9.4, "9s"), (89, "1m29s"), (3600, "1h00m"), (11100, "3h05m"), (187200, "2d04h")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
