"""Peers run in environments of their own: here with modules that only look like them."""

import venv
from pathlib import Path

import pytest

from xdeepserve.bench.wall import peers
from xdeepserve.bench.wall.generation import Contender, Task, rows
from xdeepserve.bench.wall.peers import Peer, find_python
from xdeepserve.errors import InputError, XDeepServeError

XLLAMACPP = """
import os
from types import SimpleNamespace as Space

print("what the engine prints")

class CommonParams(Space):
    def __init__(self):
        super().__init__(model=Space(), cpuparams=Space(), cpuparams_batch=Space())

class Server:
    def __init__(self, params):
        assert params.n_ctx == params.n_parallel * 64, params

    def handle_completions(self, request):
        assert request["cache_prompt"] is False
        prompts = request["prompt"]
        if prompts[0][0] == 13:
            os.write(2, b"out of luck\\n")
            os._exit(3)
        reasons = ["stop" if prompt[0] == 12 else "length" for prompt in prompts]
        return {"choices": [{"finish_reason": reason} for reason in reasons]}
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one environment, which has something called xllamacpp."""
    directory = tmp_path_factory.mktemp("peers")
    venv.create(directory / "any", symlinks=True)
    (site,) = directory.glob("any/lib/python3*/site-packages")
    (site / "xllamacpp").mkdir()
    (site / "xllamacpp" / "__init__.py").write_text(XLLAMACPP)
    return directory


@pytest.fixture
def python(environments: Path) -> Path:
    found = find_python(environments, "xllamacpp")
    assert found is not None
    return found


def test_a_peer_answers_from_its_own_process(python: Path, tmp_path: Path) -> None:
    with Peer(python, "llama.cpp", tmp_path / "a.gguf", 2, 8, 64) as peer:
        assert peer.version == "?"
        peer.generate([[10, 11], [11, 12]], 5)
        with pytest.raises(XDeepServeError, match=r"llama.cpp made 5 tokens, asked for 10"):
            peer.generate([[12], [10]], 5)
        with pytest.raises(XDeepServeError, match=r"llama.cpp ended with code 3: out of luck"):
            peer.generate([[13]], 5)
        with pytest.raises(XDeepServeError, match="ended with code 3"):
            peer.generate([[10]], 5)


def test_a_peer_that_does_not_answer_is_given_up(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "DEADLINE_S", 0.0)
    with pytest.raises(XDeepServeError, match=r"llama.cpp has not answered within 0 s"):
        Peer(python, "llama.cpp", tmp_path / "a.gguf", 2, 8, 64)


def test_what_is_absent_is_skipped_with_a_line(
    environments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(generate: peers.Generate, vocab_size: int = 320) -> peers.Rates:
        generate([[10, 11]], 3)
        yield "batch=1", 7.0

    found = list(peers.peer_rows("decode", environments, tmp_path, 2, 4, 64, measure))
    assert found == []
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"xdeepserve bench: note: llama.cpp is skipped: {tmp_path} has no .gguf",
        f"xdeepserve bench: note: vllm/bfloat16 is skipped: no environment in {environments} has vllm",
        *(
            f"xdeepserve bench: note: transformers/{dtype} is skipped: "
            f"no environment in {environments} has transformers"
            for dtype in ("float32", "bfloat16")
        ),
    ]
    (tmp_path / "q8_0.gguf").touch()
    (row,) = peers.peer_rows("decode", environments, tmp_path, 2, 4, 64, measure)
    assert (row.name, row.value, row.note) == (
        "decode/llama.cpp/q8_0/threads=1..2/batch=1",
        7.0,
        "version ?",
    )


def test_a_peer_that_fails_is_skipped_with_its_reason(
    environments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(generate: peers.Generate) -> peers.Rates:
        generate([[13]], 1)
        yield "batch=1", 7.0

    (tmp_path / "q8_0.gguf").touch()
    assert list(peers.peer_rows("decode", environments, tmp_path, 1, 4, 64, measure)) == []
    assert "llama.cpp is skipped: bench: llama.cpp ended with code 3: out of luck" in capsys.readouterr().err


def test_peers_that_are_nowhere_are_refused_first(tmp_path: Path) -> None:
    suite = Task("decode", lambda generate, vocab_size: iter(()), [Contender("monolithic")], 1, 64)
    with pytest.raises(InputError, match=r"--peers: .*none is not a directory"):
        next(rows(suite, str(tmp_path), tmp_path / "none"))
    with pytest.raises(InputError, match=r"--peers needs --model DIRECTORY, .* found tiny"):
        next(rows(suite, "tiny", tmp_path))


def test_some_peers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.chosen(["vllm"]) == ["vllm/bfloat16"]
    assert peers.chosen(["transformers", "llama.cpp"]) == [
        each for each in peers.MODULES if "vllm" not in each
    ]
    assert peers.chosen(["transformers/bfloat16"]) == ["transformers/bfloat16"]
    assert list(peers.peer_rows("decode", tmp_path, tmp_path, 1, 4, 64, lambda _: iter(()), ["vllm"])) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "vllm/bfloat16 is skipped" in line
    suite = Task("decode", lambda generate, vocab_size: iter(()), [Contender("monolithic")], 1, 64)
    with pytest.raises(InputError, match=r"--peer must be one of llama.cpp, .*, found 'torch'"):
        next(rows(suite, str(tmp_path), tmp_path, ["torch"]))
    with pytest.raises(InputError, match="--peer needs --peers"):
        next(rows(suite, "tiny", None, ["vllm"]))
