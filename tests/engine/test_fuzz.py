"""Random traffic against the whole engine core."""

from __future__ import annotations

from engine_fuzz import fuzz


def test_every_request_equals_its_solo_run() -> None:
    totals = fuzz(400)
    for name in ("preemptions", "resumed_tokens", "shared_blocks", "awaited_prefixes", "cached_tokens"):
        assert getattr(totals, name) > 0, f"the fuzz never met {name}"
    assert 0 < totals.accepted_tokens < totals.drafted_tokens
    for name in ("finished", "aborted", "failed", "refused"):
        assert getattr(totals, name) > 0, f"the fuzz never met {name}"
