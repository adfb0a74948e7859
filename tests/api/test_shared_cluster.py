"""Job executors that share a pod, as processes: whichever is killed, every request has its answer."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.commands import Command
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main

SECONDS = 180.0
NUM_TOKENS = 150
PROMPTS = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(8)]


@contextmanager
def cluster(state: Path, jes: int) -> Iterator[tuple[openai.OpenAI, Callable[[], list[dict[str, Any]]]]]:
    """A cluster that shares a pod, when all are ready: a client, and what tells its members."""
    command = Command(
        "cluster", "--shared", "--jes", str(jes), "--port", "0", "--state", str(state),
        "--", "--set", "max_model_len=256", "--deployment", "pd", "--set", "prefill.count=2",
    )  # fmt: skip
    pids: set[int] = set()
    try:
        address = command.says("listening on")

        def members() -> list[dict[str, Any]]:
            with urllib.request.urlopen(f"{address}/cluster", timeout=60) as answer:
                found: list[dict[str, Any]] = json.load(answer)["members"]
            pids.update(each["pid"] for each in found)
            return found

        until(lambda: states(members()) == ["ready"] * (jes + 1), "all members to be ready")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=SECONDS) as client:
            yield client, members
    finally:
        command.end()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of {pids}")


def states(members: list[dict[str, Any]]) -> list[str]:
    return [each["state"] for each in members]


def until(what: Callable[[], Any], name: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, f"waited {SECONDS:g} s for {name}"
        time.sleep(0.02)


def asked(number: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPTS[number],
        "max_tokens": NUM_TOKENS,
        "temperature": 1.0,
        "seed": number,
        "extra_body": {"ignore_eos": True},
    }


def streamed(client: openai.OpenAI, number: int, begun: threading.Event) -> str:
    """The text of a stream, whose chunks all have the same id and time."""
    chunks = []
    for chunk in client.completions.create(**asked(number), stream=True):
        chunks.append(chunk)
        begun.set()
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    return "".join(chunk.choices[0].text for chunk in chunks)


def whole(client: openai.OpenAI, number: int, begun: threading.Event | None = None) -> str:
    answer = client.completions.create(**asked(number))
    assert answer.choices[0].finish_reason == "length"
    return str(answer.choices[0].text)


def expected() -> list[str]:
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with LLM("tiny", "monolithic", overrides=["max_model_len=256"]) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["cluster", "--jes", "x"], "--jes: expected N or LEAST:MOST, found 'x'"),
        (["cluster", "--jes", "3:2", "--shared"], "the least number first, found 3:2"),
        (["cluster", "--jes", "1:2"], "--jes 1:2 needs --shared"),
        (["cluster", "--shared", "--", "--pod", "a"], "--pod is the cluster's own"),
        (["serve", "--pod", "a", "--member", "je-0"], "--pod needs --uds"),
    ],
)
def test_options_that_cannot_work(
    tmp_path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = words
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([command, "--state", str(tmp_path), *options]))
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_a_state_directory_too_deep_for_sockets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--shared", "--state", str(tmp_path / ("a" * 90))]) == 2
    assert "90 bytes at most; use a shorter one" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["je", "pod"])
def test_every_request_is_answered_whoever_is_killed(tmp_path: Path, lost: str) -> None:
    texts = expected()
    with (
        cluster(tmp_path / "state", 2) as (client, members),
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        victims = ["pod"] if lost == "pod" else ["je-0", "je-1"]
        for victim in victims:
            until(lambda: states(members())[0] == "ready", "je-0 to be ready")
            begun, kinds = threading.Event(), itertools.cycle((streamed, whole))
            waits = [pool.submit(next(kinds), client, number, begun) for number in range(len(PROMPTS))]
            assert begun.wait(SECONDS), f"waited {SECONDS:g} s for the first chunk of a stream"
            os.kill({each["name"]: each["pid"] for each in members()}[victim], signal.SIGKILL)
            assert not all(wait.done() for wait in waits), "killed too late"
            assert [wait.result() for wait in waits] == texts
        until(lambda: states(members()) == ["ready"] * 3, "all members to be ready again")
        assert whole(client, 0) == texts[0]
        metrics = urllib.request.urlopen(f"{client.base_url.scheme}://{client.base_url.netloc.decode()}/load")
        assert json.load(metrics) == {"server_load": 0}, "nothing is left in the pod"
