"""Children of `os.fork()`: each uses or ends an LLM of its parent's, or hears at once why not, and ends."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import InputError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PROMPT = [11, 30, 7]
SECONDS = 60.0  # in which a child must have ended; it takes a fraction of one on a machine at rest


def forked(child: Callable[[], object]) -> str:
    """What a child says: the result of `child`, or its error; then it must end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            said = repr(child())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os.close(write)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    try:
        said = _read(read)
        assert _has_ended(pid), f"the child hangs; it has said {said!r}"
        return said
    finally:
        os.close(read)


def _read(pipe: int) -> str:
    said = b""
    deadline = time.monotonic() + SECONDS
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (more := os.read(pipe, 65536)):
            break
        said += more
    return said.decode()


def _has_ended(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def tokens(llm: LLM) -> list[int]:
    """Generate a few tokens with an LLM."""
    return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def of_its_own() -> list[int]:
    """Make an LLM, and generate with it."""
    with LLM("tiny-random", progress=False) as llm:
        return tokens(llm)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-random", "pd") as made:
        wanted = tokens(made)
        yield made
        assert tokens(made) == wanted, "whatever its children have done"
        made.engine.check_integrity()


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": tokens,
    "logits": lambda llm: llm.logits(PROMPT),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}]),
    "add_te": lambda llm: llm.add_te("decode"),
    "beside": lambda llm: LLM("tiny-random", beside=llm),
    "run": lambda llm: llm.run(llm.engine.check_health()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_child_hears_at_once_that_the_llm_is_not_its_own(llm: LLM, call: str) -> None:
    said = forked(lambda: CALLS[call](llm))
    assert said.startswith(
        f"XDeepServeError: this LLM belongs to process {os.getpid()}, which forked this one ("
    )
    assert said.endswith("): make an LLM in this process")


def test_a_child_may_look_at_an_llm_and_close_it(llm: LLM) -> None:
    def look() -> object:
        with llm:
            seen = repr(llm), llm.virtual_ns
        llm.close()
        return seen

    assert forked(look) == repr((repr(llm), llm.virtual_ns))


def test_a_child_collects_garbage(llm: LLM) -> None:
    """Finalizers of the parent's objects run there, too."""
    assert forked(lambda: [LLM("tiny-random") and None, gc.collect() and None]) == "[None, None]"


def test_a_child_makes_an_llm_of_its_own(llm: LLM) -> None:
    wanted = tokens(LLM("tiny-random"))
    assert forked(of_its_own) == repr(wanted)


def test_a_child_is_forked_while_others_generate(llm: LLM) -> None:
    """Locks that other threads hold at that moment are not held for ever in the child."""
    ends, wanted = threading.Event(), of_its_own()

    def generate() -> None:
        while not ends.is_set():
            tokens(llm)

    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(generate) for _ in range(2)]
        try:
            for _ in range(2):
                assert forked(of_its_own) == repr(wanted)
                assert "belongs to process" in forked(lambda: tokens(llm))
        finally:
            ends.set()
    for each in work:
        each.result()


def work(_: int) -> list[int]:
    """Work of a process of multiprocessing."""
    return of_its_own()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_of_multiprocessing(llm: LLM, how: str) -> None:
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.map_async(work, range(2)).get(2 * SECONDS) == [of_its_own()] * 2


def test_a_script_ends_after_its_child(tmp_path: Path) -> None:
    """Both end by themselves: nobody calls close."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from xdeepserve import LLM\n"
        "llm = LLM('tiny-random')\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(os.waitpid(child, 0)[1])\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=2 * SECONDS)
    assert (run.stdout, run.stderr, run.returncode) == ("0\n", "", 0)


def test_a_template_is_rendered_in_parent_and_child() -> None:
    """Each has a process of its own for it: answers are not mixed up."""
    messages = [[{"role": "user", "content": text}] for text in ("parent", "child")]
    with LLM("tiny") as llm:
        assert llm.tokenizer is not None
        render = llm.tokenizer.apply_chat_template
        parent, child = render(messages[0]), render(messages[1])
        assert forked(lambda: [render(messages[1]) for _ in range(3)]) == repr([child] * 3)
        assert [render(messages[0]) for _ in range(3)] == [parent] * 3


@contextlib.contextmanager
def idle_child() -> Iterator[None]:
    """A child that touches nothing, like a worker of a data loader."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_pool_is_free_again_beside_an_idle_child(tmp_path: Path) -> None:
    where = {"ems.path": str(tmp_path / "a" / "pool")}
    llm = LLM("tiny-random", overrides=where)
    with idle_child():
        wanted = tokens(llm)
        with pytest.raises(InputError, match="in use by another LLM of this process"):
            LLM("tiny-random", overrides=where)
        said = forked(lambda: LLM("tiny-random", overrides=where))
        assert said.endswith(f"this memory pool is in use by process {os.getpid()}"), (
            "the child is another one"
        )
        llm.close()
        with LLM("tiny-random", overrides=where) as again:
            assert tokens(again) == wanted


def test_server_processes_end_beside_an_idle_child() -> None:
    """The child has no end of their pipes, which would keep them alive."""
    overrides = [
        "experts.transport=shm",
        "experts.routed_dies=1",
        "experts.shared_dies=1",
        "attention.dies=1",
    ]
    llm = LLM("tiny-random", "eaas", overrides=overrides)
    children = llm.engine.plan.outside[0].children  # type: ignore[attr-defined]
    processes = [children.monitor, *children.servers.values()]
    with idle_child():
        tokens(llm)
        said = forked(lambda: tokens(llm))
        assert said.startswith("XDeepServeError: this LLM belongs to")
        tokens(llm)
        llm.close()
        assert [process.returncode for process in processes] == [0] * len(processes), "none was killed"


@pytest.mark.campaign
def test_five_hundred_forks(llm: LLM, tmp_path: Path) -> None:
    """Children of every kind, one after the other, while the parent goes on."""
    wanted, refusal = tokens(llm), f"XDeepServeError: this LLM belongs to process {os.getpid()}"
    kinds: list[tuple[Callable[[], object], str]] = [
        (lambda: tokens(llm), refusal),
        (llm.close, "None"),
        (lambda: gc.collect() and None, "None"),
        (lambda: llm.logits(PROMPT), refusal),
    ]
    own = of_its_own, repr(of_its_own())
    for number in range(500):
        child, answer = own if number % 20 == 0 else kinds[number % len(kinds)]
        assert forked(child).startswith(answer)
        if number % 25 == 0:
            assert tokens(llm) == wanted
