"""The dashboard and the rules for Prometheus: each of their queries finds data in a served run's /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from xdeepserve.api.server.server import build_app
from xdeepserve.llm import build_engine

MONITORING = Path(__file__).parents[2] / "tools" / "monitoring"
RECORDED = re.compile(r"record: (\S+)\n\s+expr: (.+)")
EXPRESSION = re.compile(r"^\s+expr: (.+)$", re.MULTILINE)
SELECTOR = re.compile(r"((?:vllm|xdeepserve|model):[\w:]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GRAFANA = {"$model": ".*", "$__rate_interval": "5m"}

Series = dict[str, list[tuple[dict[str, str], float]]]


def queries() -> list[tuple[str, str]]:
    """What each panel and each rule asks, with its name."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    panels = [
        (panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]
    ]
    rules = EXPRESSION.findall((MONITORING / "rules.yml").read_text())
    return [*panels, *((f"rule {number}", rule) for number, rule in enumerate(rules))]


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    return dict(RECORDED.findall((MONITORING / "rules.yml").read_text()))


@pytest.fixture
async def series() -> Series:
    """What is scraped after a little work, with drafts, prefixes and tokens of every kind."""
    engine = build_engine("tiny", "monolithic", "int8", overrides=["mtp=1", "max_model_len=128"])
    engine.load()
    async with TestClient(TestServer(build_app(engine))) as client:
        for _ in range(2):
            body: dict[str, Any] = {
                "prompt": "a long way from home, a very long way",
                "max_tokens": 8,
                "n": 2,
            }
            assert (await client.post("/v1/completions", json=body)).status == 200
        text = await (await client.get("/metrics")).text()
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def matches(labels: dict[str, str], wanted: str) -> bool:
    """Whether a series fits `name="value", name=~"regex"`."""
    rules = MATCHER.findall(wanted)
    assert len(rules) == wanted.count("="), wanted
    return all(
        labels.get(name, "") == value if how == "=" else re.fullmatch(value, labels.get(name, "")) is not None
        for name, how, value in rules
    )


async def test_every_panel_and_every_rule_has_data(series: Series, recorded: dict[str, str]) -> None:
    asked = queries()
    assert len(asked) > 30
    for name, query in asked:
        for variable, value in GRAFANA.items():
            query = query.replace(variable, value)
        found = SELECTOR.findall(query)
        assert found, (name, query)
        for metric, wanted in found:
            if metric in recorded:
                continue
            fitting = [value for labels, value in series.get(metric, ()) if matches(labels, wanted)]
            assert fitting, f"{name}: nothing fits {metric}{{{wanted}}}"
            if metric.endswith("_bucket"):
                assert max(fitting) > 0, f"{name}: {metric} has no samples"


async def test_what_is_divided_by_was_counted(series: Series) -> None:
    """Shares are not NaN: there were drafts and lookups."""
    for metric in re.findall(r"/ (?:on \(\w+\) (?:group_left \(\) )?)?rate\((\S+?)[{[]", str(queries())):
        assert sum(value for _, value in series[metric]) > 0, metric


def test_panels_say_what_they_show() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert all(panel["description"].endswith(".") for panel in panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len(set(places)) == len(panels)
