"""A real Prometheus scrapes a real server, and answers every query of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_metrics import dashboard_queries
from serve_process import chat, running

PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no `prometheus` on the PATH")

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: lmdeploy
    authorization: {{credentials: secret}}
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    def __init__(self, target: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(target=target))
        listen = self._url.removeprefix("http://")
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._log = (folder / "prometheus.log").open("w")
        command = [str(PROMETHEUS), *flags, f"--web.listen-address={listen}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            body = json.load(answer)
        assert body["status"] == "success"
        return body["data"]

    def until(self, path: str, condition: Any) -> Any:
        deadline = time.monotonic() + 40
        while True:
            try:
                seen = self.get(path)
            except OSError:
                seen = None
            if seen is not None and condition(seen):
                return seen
            assert time.monotonic() < deadline, f"{path}: {seen}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a server before and after a few answers."""
    with running(script="abc", step_seconds=0.001, options={"api_keys": ["secret"]}) as server:
        prometheus = Prometheus(server.url.removeprefix("http://"), tmp_path)
        try:
            prometheus.until("targets", lambda t: [a["health"] for a in t["activeTargets"]] == ["up"])
            for number in range(3):
                body = json.dumps(chat(f"question {number}")).encode()
                head = {"content-type": "application/json", "x-api-key": "secret"}
                urllib.request.urlopen(
                    urllib.request.Request(f"{server.url}/v1/chat/completions", body, head), timeout=30
                ).read()
            time.sleep(2.5)
            yield prometheus
        finally:
            prometheus.close()


def test_target_is_up_and_queries_of_the_dashboard_work(scraped: Prometheus) -> None:
    (target,) = scraped.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    stored = set(scraped.get("label/__name__/values"))
    known = scraped.get("metadata")
    for query in dashboard_queries():
        names = re.findall(r"lmdeploy:\w+", query)
        assert set(names) <= stored, query
        scraped.get("query", query=query.replace("$model", ".*").replace("$__rate_interval", "5s"))
    types = {name: entries[0]["type"] for name, entries in known.items()}
    assert types["lmdeploy:time_to_first_token_seconds"] == "histogram"
    assert types["lmdeploy:generation_tokens_total"] == "counter"
    (total,) = scraped.get("query", query="lmdeploy:generation_tokens_total")["result"]
    assert float(total["value"][1]) == 3 * 40
    (median,) = scraped.get(
        "query", query="histogram_quantile(0.5, lmdeploy:request_generation_tokens_bucket)"
    )["result"]
    assert 20 < float(median["value"][1]) <= 50
