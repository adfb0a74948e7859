"""NVIDIA's aiperf: synthetic requests, several at a time, streamed, counted by the server and by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import BASE_URL, MODEL, TOKENIZER, feature, version

version("aiperf")
for kind in ("chat", "completions"):

    @feature("load", kind)
    def _(kind: str = kind) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                Path(sys.executable).with_name("aiperf"),
                "profile",
                *("--model", MODEL, "--url", BASE_URL, "--endpoint-type", kind, "--streaming"),
                *("--tokenizer", TOKENIZER, "--concurrency", "4", "--request-count", "16"),
                *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"),
                *("--extra-inputs", "ignore_eos:true"),  # it takes an empty answer for a failure
                *("--output-artifact-dir", folder, "--ui", "none"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
            [file] = Path(folder).rglob("profile_export_aiperf.json")
            found = json.loads(file.read_text())
            assert found["request_count"]["avg"] == 16, found["request_count"]
            assert found["time_to_first_token"]["avg"] > 0
