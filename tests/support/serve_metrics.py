"""Reads /metrics with the parser of the Prometheus client, and the queries of the dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import Api

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/dashboard/lmdeploy.json"


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            s.value
            for s in self.samples
            if s.name == f"lmdeploy:{name}" and labels.items() <= s.labels.items()
        ]
        assert len(found) == 1, f"{name}{labels}: {len(found)} samples"
        return found[0]


async def scrape(server: Api) -> Scrape:
    answer = await server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


def dashboard_queries() -> list[str]:
    """Everything that a panel of the dashboard asks for."""
    queries: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            queries.extend([value["expr"]] if "expr" in value else [])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(json.loads(DASHBOARD.read_text()))
    return queries
