"""Prometheus scrapes the server, and answers every query of the dashboards and every rule.

Takes `prometheus` and `promtool` from PATH; dashboards and rule files from `QUERIES`, joined by colons.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from features import BASE_URL, MODEL, feature

HERE = "127.0.0.1:19090"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs: [{{job_name: xdeepserve, static_configs: [{{targets: ["{target}"]}}]}}]
"""
FILES = [Path(name) for name in os.environ["QUERIES"].split(":")]
VARIABLES = {
    "$__rate_interval": "15s",
    "${__rate_interval}": "15s",
    "$__interval": "15s",
    "$__range": "15s",
    "${percentile}": "0.9",
    "$percentile": "0.9",
    "$Deployment_id": MODEL,
    "$model_name": MODEL,
    "$model": MODEL,
}


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def expressions(file: Path) -> Iterator[tuple[str, str]]:
    """Of a Grafana dashboard: each panel's title and query."""
    panels = json.loads(file.read_text())["panels"]
    while panels:
        panel = panels.pop()
        panels += panel.get("panels", [])
        for target in panel.get("targets", []):
            if target.get("expr"):
                yield panel.get("title", "?"), target["expr"]


def answer(query: str) -> list[dict[str, Any]]:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    query = re.sub(r"=\s*\"\$\w+\"", '=~".*"', query)
    url = f"http://{HERE}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    return [one for one in json.loads(fetched(url))["data"]["result"] if one["value"][1] != "NaN"]


def busy() -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "n": 2}
    request = urllib.request.Request(
        f"{BASE_URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    fetched(request)


said = subprocess.getoutput("prometheus --version").split(" (")[0].replace(", version", "")
print(json.dumps({"version": said}), flush=True)
rules = [str(file.resolve()) for file in FILES if file.suffix == ".yml"]


@feature("metrics", "promtool check metrics")
def _() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=fetched(f"{BASE_URL}/metrics"), capture_output=True
    )
    assert done.returncode in (0, 3), done.stderr.decode()  # 3: matters of taste, such as colons in names


@feature("metrics", "promtool check rules")
def _() -> None:
    done = subprocess.run(["promtool", "check", "rules", *rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder, "prometheus.yml")
    config.write_text(CONFIG.format(rules=json.dumps(rules), target=BASE_URL.removeprefix("http://")))
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={HERE}",
            "--log.level=error",
        ]
    )
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            busy()

        @feature("metrics", "scraped")
        def _() -> None:
            assert answer('up{job="xdeepserve"} == 1'), "the target is not up"

        @feature("metrics", "rules evaluated")
        def _() -> None:
            groups = json.loads(fetched(f"http://{HERE}/api/v1/rules"))["data"]["groups"]
            ill = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]
            assert not ill, ill
            for rule in (rule for group in groups for rule in group["rules"]):
                if rule["type"] == "recording":
                    assert answer(rule["name"]), f"{rule['name']} has no data"

        for file in FILES:
            if file.suffix == ".json":

                @feature("metrics", f"dashboard {file.parent.name}/{file.name}")
                def _(file: Path = file) -> None:
                    asked = list(expressions(file))
                    busy()
                    empty = [f"{title}: {query}" for title, query in asked if not answer(query)]
                    assert asked
                    assert not empty, f"{len(empty)} of {len(asked)} without data: {empty}"
    finally:
        server.terminate()
        server.wait(20)
