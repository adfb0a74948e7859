"""guidellm: requests of synthetic lengths, several at a time, chats and completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import BASE_URL, MODEL, TOKENIZER, feature, version

version("guidellm")
for path in ("/v1/chat/completions", "/v1/completions"):

    @feature("load", path)
    def _(path: str = path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                Path(sys.executable).with_name("guidellm"),
                "run",
                *("--backend", f"kind=openai_http,target={BASE_URL},model={MODEL},request_format={path}"),
                *("--profile", "kind=concurrent,streams=4"),
                *("--constraint", "kind=max_requests,count=16"),
                *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
                *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
                *("--output", f"kind=json,path={folder}/out.json"),
                "--disable-progress",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
            [benchmark] = json.loads(Path(folder, "out.json").read_text())["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            assert (totals["successful"], totals["errored"]) == (16, 0), totals
