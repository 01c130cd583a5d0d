"""Programs that make loops of tools and objects of answers: instructor, pydantic-ai, openai-agents."""

from __future__ import annotations

from typing import Any

import agents
import instructor
import openai
import pytest
from expected import ADA, ASK_ADA, ASK_ONE, KEY, MODEL, TOLD_ONE, Person, user
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.value))
def test_instructor(base_url: str, mode: Any) -> None:
    plain = openai.OpenAI(api_key=KEY, base_url=base_url, max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    asked: Any = {"model": MODEL, "messages": user(ASK_ADA), "response_model": Person, "max_retries": 0}
    assert client.create(**asked).model_dump() == ADA.model_dump()  # of a class that instructor derives
    if mode == instructor.Mode.TOOLS:
        assert list(client.create_partial(**asked))[-1].model_dump() == ADA.model_dump()


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai(base_url: str, kind: Any) -> None:
    model = kind(MODEL, provider=OpenAIProvider(base_url=base_url, api_key=KEY))
    assert Agent(model, output_type=Person).run_sync(ASK_ADA).output == ADA

    def get_weather(city: str) -> str:
        return f"sunny, 18 in {city}"

    assert Agent(model, tools=[get_weather]).run_sync(ASK_ONE).output == TOLD_ONE


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents(base_url: str, kind: Any, streamed: bool) -> None:
    agents.set_tracing_disabled(True)
    asked = []

    def get_weather(city: str) -> str:
        asked.append(city)
        return "sunny, 18"

    client = openai.AsyncOpenAI(api_key=KEY, base_url=base_url, max_retries=0)
    agent = agents.Agent(
        name="guide", model=kind(MODEL, openai_client=client), tools=[agents.function_tool(get_weather)]
    )
    if streamed:
        run: Any = agents.Runner.run_streamed(agent, ASK_ONE)
        async for _ in run.stream_events():
            pass
    else:
        run = await agents.Runner.run(agent, ASK_ONE)
    assert (run.final_output, asked) == (TOLD_ONE, ["Paris"])
