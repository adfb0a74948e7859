"""Commands run as processes: a monitor, expert servers and a server, and clients that load them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main

PATIENCE_S = 600.0  # a server that compiles all its kernels while others do, too
NUM_TOKENS = 8
PROMPTS = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(12)]
SHM = "experts.transport=shm"
ENVIRONMENT = {**os.environ, "XDEEPSERVE_TOKEN": "a token"}


class Command:
    """A running command, whose lines are kept. `machine`: words before it that have it run elsewhere."""

    def __init__(self, *words: str, machine: Sequence[str] = ()) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*machine, sys.executable, "-m", "xdeepserve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def says(self, text: str, count: int = 1) -> str:
        """The last word of the line that says this, for the time that is `count`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [line for line in self.lines if text in line]
            if len(found) >= count:
                return found[count - 1].split()[-1]
            assert time.monotonic() < deadline, f"no {text!r} in {self.lines}"
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reading.join(10)
        return code


class Deployed:
    """A monitor, and servers by name."""

    def __init__(self, *settings: str) -> None:
        self.settings = [word for each in settings for word in ("--set", each)]
        self.monitor = Command("monitor", "--port", "0")
        self.address = self.monitor.says("listening on")
        self.servers: dict[str, Command] = {}

    def server(self, name: str, *words: str) -> Command:
        where = ("--monitor", self.address, "--name", name)
        command = Command("expert-server", *self.settings, *where, *words)
        self.servers[name] = command
        return command

    def close(self) -> None:
        for command in (*self.servers.values(), self.monitor):
            command.process.kill()
            command.end()


@contextmanager
def served(there: Deployed) -> Iterator[openai.OpenAI]:
    settings = (*there.settings, "--set", f"experts.monitor={there.address}")
    serve = Command("serve", "--deployment", "eaas", *settings, "--port", "0")
    try:
        address = serve.says("listening on")
        where = {"base_url": f"{address}/v1", "api_key": "none"}
        with openai.OpenAI(**where, max_retries=0, timeout=PATIENCE_S) as client:
            yield client
        assert serve.end(signal.SIGTERM) == 0, serve.lines
    finally:
        serve.process.kill()
        serve.end()


def expected() -> list[str]:
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with LLM("tiny", "monolithic", overrides=["max_model_len=128"]) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


class Load:
    """Clients that ask without a pause, and compare what they hear."""

    def __init__(self, client: openai.OpenAI, texts: list[str], num_clients: int = 4) -> None:
        self._client, self._texts, self._ends = client, texts, threading.Event()
        self.done: list[float] = []  # when each request was
        self.wrong: list[Any] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(n, num_clients)) for n in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, first: int, step: int) -> None:
        number = first
        while not self._ends.is_set():
            which = number % len(PROMPTS)
            try:
                found = self._client.completions.create(
                    model="tiny",
                    prompt=PROMPTS[which],
                    max_tokens=NUM_TOKENS,
                    temperature=1.0,
                    seed=which,
                    extra_body={"ignore_eos": True},
                )
                if found.choices[0].text != self._texts[which]:
                    self.wrong.append((which, found.choices[0].text))
            except openai.OpenAIError as error:
                self.wrong.append(error)
            self.done.append(time.monotonic())
            number += step

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second."""
        return NUM_TOKENS * sum(begin < at <= end for at in self.done) / (end - begin)

    def during(self, seconds: float, at_least: int) -> float:
        """Tokens per second in the next so many seconds, or as long as so many requests take."""
        begin, before = time.monotonic(), len(self.done)
        while time.monotonic() - begin < seconds or len(self.done) - before < at_least:
            assert not self.wrong, self.wrong[:3]
            assert time.monotonic() - begin < seconds + PATIENCE_S, "requests stand still"
            time.sleep(0.05)
        return self.rate(begin, time.monotonic())

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request does not end"
        assert not self.wrong, self.wrong[:3]


def refusal(*words: str) -> str:
    """Return the line with which a command refuses that is called here: tests of processes start others."""
    with (
        pytest.MonkeyPatch.context() as patch,
        io.StringIO() as err,
        contextlib.redirect_stderr(err),
    ):
        patch.setenv("XDEEPSERVE_TOKEN", ENVIRONMENT["XDEEPSERVE_TOKEN"])
        try:
            code: object = main(words)
        except SystemExit as stop:  # of the parser
            code = stop.code
        said = err.getvalue()
    assert code in (1, 2)
    assert "Traceback" not in said
    (line,) = [each for each in said.splitlines() if "error" in each]
    return line
