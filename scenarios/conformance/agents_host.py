"""Runs agent frameworks against a gateway, in an environment of their own: `agents_host.py URL`.

Each framework gets a tool `add`, a question that needs it, and nothing of ours. The program prints one JSON object:
by framework, its final answer and the calls that its tool got.
"""

# pyright: reportMissingImports=false
# The frameworks are installed in another environment.

import asyncio
import json
import sys
from typing import Any

QUESTION = "what is 1 and 2"


def openai_agents(url: str) -> dict[str, Any]:
    """openai-agents, whole and streamed."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    calls: list[list[int]] = []

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append([a, b])
        return f"result {a + b}"

    async def run() -> list[str]:
        set_tracing_disabled(True)
        model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=url, api_key="none"))
        agent = Agent(name="a", instructions="be brief", model=model, tools=[add])
        whole = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return [str(whole.final_output), str(streamed.final_output)]

    return {"answers": asyncio.run(run()), "calls": calls}


def pydantic_ai(url: str) -> dict[str, Any]:
    """pydantic-ai, whole and streamed."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    calls: list[list[int]] = []
    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key="none")))

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append([a, b])
        return f"result {a + b}"

    async def run() -> list[str]:
        whole = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as streamed:
            return [whole.output, await streamed.get_output()]

    return {"answers": asyncio.run(run()), "calls": calls}


def langchain(url: str) -> dict[str, Any]:
    """langchain-openai: the loop of calls is written out, because the framework for it is another package."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    calls: list[list[int]] = []

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append([a, b])
        return f"result {a + b}"

    adder = tool(add)
    model = ChatOpenAI(model="policy", base_url=url, api_key="none").bind_tools([adder])  # type: ignore[arg-type]
    answers: list[str] = []
    for streamed in (False, True):
        messages: list[Any] = [HumanMessage(QUESTION)]
        while True:
            if streamed:
                parts = list(model.stream(messages))
                answer = parts[0]
                for part in parts[1:]:
                    answer += part
            else:
                answer = model.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                messages.append(ToolMessage(adder.invoke(call["args"]), tool_call_id=call["id"]))
        answers.append(str(messages[-1].content))
    return {"answers": answers, "calls": calls}


FRAMEWORKS = {"openai-agents": openai_agents, "pydantic-ai": pydantic_ai, "langchain-openai": langchain}

if __name__ == "__main__":
    print(json.dumps({name: run(sys.argv[1]) for name, run in FRAMEWORKS.items()}))
