"""`vllm bench serve`: vLLM's serving benchmark, in its own package."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from features import BASE_URL, MODEL, TOKENIZER, feature, version
from vllm.benchmarks import serve

version("vllm")
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):

    @feature("load", backend)
    def _(backend: str = backend, path: str = path) -> None:
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        with tempfile.TemporaryDirectory() as folder:
            options = [
                *("--backend", backend, "--base-url", BASE_URL, "--endpoint", path),
                *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"),
                *("--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "16"),
                *("--max-concurrency", "4", "--save-result", "--result-dir", folder),
                *("--result-filename", "out.json"),
            ]
            serve.main(parser.parse_args(options))
            found = json.loads(Path(folder, "out.json").read_text())
        assert found["completed"] == 16, found
        assert found["mean_ttft_ms"] > 0
