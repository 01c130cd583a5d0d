"""Which server gets a request, and how the metrics of several become one."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lmdeploy.errors import ConfigError
from lmdeploy.serve.proxy.metrics import summed
from lmdeploy.serve.proxy.nodes import Node, Nodes
from lmdeploy.serve.proxy.routing import Router, wanted


def nodes(*loads: int, speeds: tuple[float, ...] = ()) -> list[Node]:
    table = Nodes()
    found = []
    for i, load in enumerate(loads):
        node = table.add(f"http://n{i}:1", speed=speeds[i] if speeds else None)
        node.unfinished = load
        found.append(node)
    return found


def chat(*texts: str, **fields: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": t} for t in texts], **fields}
    ).encode()


def test_the_least_loaded() -> None:
    a, b, c = nodes(3, 1, 2)
    router = Router("min_expected_latency", seed=1)
    assert {router.choose([a, b, c], wanted(b"{}")) for _ in range(20)} == {b}
    b.unfinished = 2
    assert {router.choose([a, b, c], wanted(b"{}")) for _ in range(50)} == {b, c}


def test_a_fast_server_holds_more() -> None:
    slow, fast = nodes(1, 3, speeds=(1, 4))
    assert Router("min_expected_latency").choose([slow, fast], wanted(b"{}")) is fast


def test_random_follows_the_speeds() -> None:
    pair = nodes(0, 0, speeds=(1, 3))
    router = Router("random", seed=3)
    counts = Counter(router.choose(pair, wanted(b"{}")).url for _ in range(4000))
    assert 0.7 < counts[pair[1].url] / 4000 < 0.8


def test_observed_latency_tries_new_servers() -> None:
    old, new = nodes(0, 0)
    old.latencies.extend([0.1, 0.2])
    router = Router("min_observed_latency")
    assert router.choose([old, new], wanted(b"{}")) is new
    new.latencies.append(1.0)
    assert router.choose([old, new], wanted(b"{}")) is old


def test_a_beginning_is_followed_until_its_server_is_busy() -> None:
    all_nodes = nodes(0, 0, 0, 0)
    router = Router("prefix_aware", seed=5)
    for talk in range(10):
        first = router.choose(all_nodes, wanted(chat(f"{talk} " + "a" * 600)))
        for turn in range(5):
            more = [f"{talk} " + "a" * 600, *("b" * 300 for _ in range(turn))]
            assert router.choose(all_nodes, wanted(chat(*more))) is first
        first.unfinished = 5
        assert router.choose(all_nodes, wanted(chat(f"{talk} " + "a" * 600))) is not first
        first.unfinished = 0


def test_a_beginning_goes_elsewhere_with_its_server() -> None:
    a, b = nodes(0, 0)
    router = Router("prefix_aware", seed=5)
    request = wanted(chat("x" * 1000))
    first = router.choose([a, b], request)
    (other,) = {a, b} - {first}
    assert router.choose([other], request) is other
    assert router.choose([a, b], request) is other


@pytest.mark.parametrize(
    "field", ["tools", "system", "instructions", "messages", "input", "input_ids", "prompt"]
)
def test_every_protocol_has_a_beginning(field: str) -> None:
    assert len(wanted(json.dumps({field: ["word"] * 200}).encode()).digests) > 4


def test_other_models_and_salts_have_other_beginnings() -> None:
    text = "x" * 1000
    plain, other = wanted(chat(text)), wanted(chat(text).replace(b'"m"', b'"n"', 1))
    salted = wanted(chat(text, cache_salt="s"))
    assert plain.model == "m"
    assert len({plain.digests[-1], other.digests[-1], salted.digests[-1]}) == 3


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_body_is_read(raw: bytes) -> None:
    wanted(raw)


@given(st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=6), st.text(min_size=1, max_size=300))
def test_more_text_keeps_the_beginning(texts: list[str], more: str) -> None:
    short, long = wanted(chat(*texts)), wanted(chat(*texts, more))
    shared = min(len(short.digests), len(long.digests))
    # The bracket that closes the list of messages may stand in the last block.
    assert short.digests[: shared - 1] == long.digests[: max(shared - 1, 0)]


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefix_aware"):
        Router("best")


ONE = """# HELP lmdeploy:x_total things
# TYPE lmdeploy:x_total counter
lmdeploy:x_total{model_name="a"} 3
lmdeploy:x_total{model_name="b"} 1
# TYPE lmdeploy:running gauge
lmdeploy:running 2
# TYPE lmdeploy:gpu_cache_usage_perc gauge
lmdeploy:gpu_cache_usage_perc 0.5
# TYPE lmdeploy:build_info gauge
lmdeploy:build_info{version="1"} 1
# TYPE lmdeploy:t_seconds histogram
lmdeploy:t_seconds_bucket{le="1.0"} 1
lmdeploy:t_seconds_bucket{le="+Inf"} 2
lmdeploy:t_seconds_count 2
lmdeploy:t_seconds_sum 3.5
"""


def test_metrics_of_several_servers_are_one() -> None:
    other = ONE.replace('"b"} 1', '"c"} 5').replace("usage_perc 0.5", "usage_perc 0.9")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in summed([ONE, other, "no { metrics", ""])
        for sample in family.samples
    }
    assert found.pop(("lmdeploy:gpu_cache_usage_perc",)) == pytest.approx(0.7)
    assert found == {
        ("lmdeploy:x_total", "a"): 6,
        ("lmdeploy:x_total", "b"): 1,
        ("lmdeploy:x_total", "c"): 5,
        ("lmdeploy:running",): 4,
        ("lmdeploy:build_info", "1"): 1,
        ("lmdeploy:t_seconds_bucket", "1.0"): 2,
        ("lmdeploy:t_seconds_bucket", "+Inf"): 4,
        ("lmdeploy:t_seconds_count",): 4,
        ("lmdeploy:t_seconds_sum",): 7,
    }


def test_sums_can_be_read_again() -> None:
    families = {family.name: family.type for family in text_string_to_metric_families(ONE)}
    assert {family.name: family.type for family in summed([ONE, ONE])} == families
