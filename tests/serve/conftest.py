"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from serve_fakes import TEXT, Api, api


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Api]:
    """One Api for all tests of a module; it answers TEXT."""
    async with api(TEXT) as server:
        yield server
