"""Other people's clients, unmodified and each from its own package, against a served `tiny`.

    python tools/clients/run.py                      all of them, and a table for docs/api.md
    python tools/clients/run.py openai langchain     some
    python tools/clients/run.py --work DIR           keep the environments there (else in a temporary one)

Each client gets an environment of its own: a venv (by uv where that is there, else by pip), or a project of
npm's. One that cannot be installed is said to be so. Prometheus and promtool come from PATH, vLLM's
dashboards from `--dashboards DIR` (its repository has them in examples/observability). Not part of
`make test`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOKENIZER = ROOT / "src" / "xdeepserve" / "model" / "preset_files" / "tiny"
FEATURES = ("text", "chat", "stream", "structured", "tools", "responses", "cancel")
COLUMNS = (*FEATURES, "load", "metrics")
INSTALL_SECONDS, RUN_SECONDS = 600, 600
SERVE = ("-m", "xdeepserve", "serve", "--model", "tiny", "--port", "0", "--set", "mtp=1")


@dataclass(frozen=True)
class Client:
    """A script and the packages that its environment has."""

    script: str
    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()  # packages without what they say they need
    columns: tuple[str, ...] = FEATURES  # each is tried, or its script says why the client has nothing for it


# vLLM's own dependencies bring CUDA; its benchmark needs none of that.
VLLM_NEEDS = (
    *("torch", "transformers", "datasets", "aiohttp", "numpy", "tqdm", "pillow", "regex", "cloudpickle"),
    *("pydantic", "msgspec", "openai", "psutil", "py-cpuinfo", "pyzmq", "einops", "fastapi", "uvloop"),
    *("cachetools", "prometheus-client", "blake3", "pandas", "setproctitle", "partial_json_parser", "gguf"),
    *("compressed-tensors", "lark", "cbor2", "openai_harmony", "pybase64", "uvicorn", "llguidance"),
    *("watchfiles", "xgrammar", "sentencepiece"),
)
CLIENTS = {
    "openai": Client("with_openai.py", ("openai",)),
    "openai-js": Client("with_openai.mjs", ("openai", "zod")),
    "anthropic": Client("with_anthropic.py", ("anthropic",)),
    "langchain": Client("with_langchain.py", ("langchain-openai",)),
    "litellm": Client("with_litellm.py", ("litellm", "mcp")),  # it imports mcp without asking for it
    "instructor": Client("with_instructor.py", ("instructor",)),
    "pydantic-ai": Client("with_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    "llama-index": Client("with_llama_index.py", ("llama-index-llms-openai-like",)),
    "openai-agents": Client("with_openai_agents.py", ("openai-agents",)),
    "smolagents": Client("with_smolagents.py", ("smolagents[openai]",)),
    "llm": Client("with_llm.py", ("llm",)),
    "ai-sdk": Client("with_ai_sdk.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")),
    "autogen": Client("with_autogen.py", ("autogen-agentchat", "autogen-ext[openai]")),
    "crewai": Client("with_crewai.py", ("crewai",)),
    "dspy": Client("with_dspy.py", ("dspy",)),
    "guidance": Client("with_guidance.py", ("guidance", "openai")),
    "haystack": Client("with_haystack.py", ("haystack-ai",)),
    "marvin": Client("with_marvin.py", ("marvin", "pydantic-ai==1.70.0")),  # it does not work with newer ones
    "mirascope": Client("with_mirascope.py", ("mirascope[openai]",)),
    "outlines": Client("with_outlines.py", ("outlines[openai]",)),
    "semantic-kernel": Client("with_semantic_kernel.py", ("semantic-kernel",)),
    "guidellm": Client("with_guidellm.py", ("guidellm",), columns=("load",)),
    "aiperf": Client("with_aiperf.py", ("aiperf",), columns=("load",)),
    "lm-eval": Client("with_lm_eval.py", ("lm-eval[api]", "transformers"), columns=("text", "chat")),
    "vllm": Client("with_vllm_bench.py", VLLM_NEEDS, alone=("vllm",), columns=("load",)),
    "prometheus": Client("with_prometheus.py", columns=("metrics",)),
}


@dataclass
class Outcome:
    """What came of one client."""

    name: str
    version: str = ""
    note: str = ""  # why it was not tried, or broke off
    lines: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        """Something does not work, and it is not said to be the client's fault; or a column has no word."""
        return bool(self.lines) and bool(self.note or self.untried or self.failed)

    @property
    def failed(self) -> int:
        return sum("failed" in line for line in self.lines)

    @property
    def untried(self) -> list[str]:
        """Columns of which the script says nothing at all."""
        said = {line["column"] for line in self.lines}
        return [column for column in CLIENTS[self.name].columns if column not in said]

    def cell(self, column: str) -> str:
        """Of the table: all works, what does not, or why the client has nothing for it."""
        lines = [line for line in self.lines if line["column"] == column]
        if absent := [line["absent"] for line in lines if "absent" in line]:
            return f"none: {'; '.join(absent)}"
        if self.lines and column in self.untried:
            return "untried"
        bad = [
            f"{line['feature']}: {line.get('failed') or line['fault']}"
            for line in lines
            if "failed" in line or "fault" in line
        ]
        if bad:
            return "; ".join(bad).replace("|", "/").replace("\n", " ")
        return f"{len(lines)} ok" if lines else ""


def install(client: Client, folder: Path) -> Path:
    """The client's environment, made if it is not there: its interpreter.

    Raises CalledProcessError, TimeoutExpired or FileNotFoundError where that cannot be done.
    """
    done = folder / ".installed"
    if client.script.endswith(".mjs"):
        node = shutil.which("node")
        if node is None or shutil.which("npm") is None:
            raise FileNotFoundError("no node here")
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            command(["npm", "init", "-y"], folder)
            command(["npm", "install", "--no-audit", "--no-fund", *client.packages], folder)
        for script in HERE.glob("*.mjs"):  # modules are looked for beside them
            shutil.copy(script, folder)
        interpreter = Path(node)
    elif client.packages:
        interpreter = folder / "bin" / "python"
        if not done.exists():
            uv = shutil.which("uv")
            pip = [uv, "pip", "install", "--python", interpreter]
            if uv is None:
                pip = [interpreter, "-m", "pip", "install"]
            command([uv, "venv", folder] if uv else [sys.executable, "-m", "venv", folder])
            command([*pip, *client.packages])
            if client.alone:
                command([*pip, "--no-deps", *client.alone])
    else:
        if shutil.which("prometheus") is None or shutil.which("promtool") is None:
            raise FileNotFoundError("no prometheus and promtool here")
        return Path(sys.executable)
    done.touch()
    return interpreter


def command(words: list[object], folder: Path | None = None) -> None:
    subprocess.run(
        [str(word) for word in words], cwd=folder, check=True, timeout=INSTALL_SECONDS, capture_output=True
    )


def tried(name: str, folder: Path, environment: dict[str, str]) -> Outcome:
    """Install a client and run its script."""
    client, outcome = CLIENTS[name], Outcome(name)
    try:
        interpreter = install(client, folder)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        outcome.note = f"cannot be installed here: {' '.join(last)[:200]}"
        return outcome
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        outcome.note = f"cannot be installed here: {error}"[:200]
        return outcome
    is_js = client.script.endswith(".mjs")
    with open(folder.parent / f"{name}.log", "w") as log:
        run = [str(interpreter), client.script if is_js else str(HERE / client.script)]
        try:
            done = subprocess.run(
                run,
                cwd=folder if is_js else None,
                env=environment,
                timeout=RUN_SECONDS,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except subprocess.TimeoutExpired:
            outcome.note, outcome.lines = f"did not end within {RUN_SECONDS} s", []
            return outcome
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            if "version" in said:
                outcome.version = said["version"]
            elif "column" in said:
                outcome.lines.append(said)
    if done.returncode or not outcome.lines:
        outcome.note = f"ended with code {done.returncode}: see {log.name}"
    return outcome


@contextlib.contextmanager
def served(*options: str) -> Iterator[str]:
    """A served `tiny`: its address."""
    with subprocess.Popen([sys.executable, *SERVE, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "http://" in line:
                    yield line[line.index("http://") :].split()[0].rstrip(".")
                    return
            raise SystemExit("the server did not start")
        finally:
            process.terminate()


def print_table(outcomes: list[Outcome]) -> None:
    """Clients and features, as docs/api.md has them."""
    print(f"\n| client | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for outcome in outcomes:
        print(f"| {outcome.version or outcome.name} | {' | '.join(map(outcome.cell, COLUMNS))} |")
    for outcome in outcomes:
        if outcome.note:
            print(f"\n{outcome.name}: {outcome.note}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Try other people's clients against a served model.")
    parser.add_argument("names", nargs="*", metavar="client", help=f"of {', '.join(CLIENTS)}; default all")
    parser.add_argument("--work", type=Path, help="where environments are kept")
    parser.add_argument("--dashboards", type=Path, help="vLLM's examples/observability")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(CLIENTS))
    if unknown:
        parser.error(f"unknown clients {', '.join(unknown)}; known are {', '.join(CLIENTS)}")
    queries = [ROOT / "tools" / "monitoring" / name for name in ("dashboard.json", "rules.yml")]
    queries += sorted(args.dashboards.rglob("*.json")) if args.dashboards else []
    outcomes = []
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "BASE_URL": stack.enter_context(served()),
            "MODEL": "tiny",
            "TOKENIZER": str(TOKENIZER),
            "QUERIES": ":".join(map(str, queries)),
        }
        for name in args.names or CLIENTS:
            begin = time.monotonic()
            outcome = tried(name, work.resolve() / name, environment)
            outcomes.append(outcome)
            works = sum(not {"failed", "absent"} & set(line) for line in outcome.lines)
            seconds = time.monotonic() - begin
            print(f"{name}: {works} work, {outcome.failed} do not; {seconds:.0f} s {outcome.note}")
    print_table(outcomes)
    return 1 if any(outcome.is_ours for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
