"""Broken requests for a while: each gets an answer that explains itself, and the server stays as it was."""

from __future__ import annotations

import serve_process
from route_fuzz import GOOD, Fuzz

SECONDS = 12.0


async def test_no_request_breaks_the_server() -> None:
    settings = {"script": "Hello, world.$", "options": {"abort_handling": True}}
    with serve_process.running(**settings) as server:
        engine = server.child()
        fuzz = Fuzz(server.url, seed=11)
        await fuzz.run(SECONDS)
        assert server.child() == engine, "the engine is the one that was started"
        async with server.http() as http:
            stats = (await http.get("/stats")).json()
            assert stats["running"] == stats["waiting"] == stats["blocks_held"] == 0
    seen = {path for path, _ in fuzz.counts}
    assert seen == set(GOOD)
    assert sum(count for (_, status), count in fuzz.counts.items() if status == 200) > 5
    assert sum(count for (_, status), count in fuzz.counts.items() if status == 400) > 50
