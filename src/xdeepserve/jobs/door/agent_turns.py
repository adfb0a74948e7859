"""A turn of an agent: a chat task on this server's pod, and the tools that it calls (DeepServe 3).

The conversation so far is in the results of finished tasks, so a new leader continues where another one was
lost. Its KV is found by the job's id (`prompt_cache_key`), no matter what was served between two turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.openai.chat import ChatAnswer, prepare_chat
from xdeepserve.api.openai.requests import ChatRequest
from xdeepserve.api.server.served_models import ServedModels
from xdeepserve.jobs.agent_tools import AgentTool
from xdeepserve.jobs.job_records import JobRecord

TOOL_S = 60.0  # of wall time, that a tool may take


class AgentTurns:
    """Takes turns of agents, on the models of a server with its tools."""

    def __init__(self, models: ServedModels, tools: Mapping[str, AgentTool]) -> None:
        self._models, self.tools = models, tools

    async def take(self, job: JobRecord) -> dict[str, Any]:
        """Take the next turn; return the `messages` that it adds, whether it is the last (`is_final`), and
        its usage. Raises RequestError if the conversation does not fit."""
        agent = job.order.agent
        assert agent is not None
        endpoint = self._models.find(job.order.model)
        asked: dict[str, Any] = {
            "model": job.order.model,
            "messages": job.conversation,
            "tools": [self.tools[name].shown() for name in agent.tools if name in self.tools] or None,
            "max_tokens": agent.max_tokens,
            "temperature": agent.temperature,
            "seed": job.number,
            "prompt_cache_key": job.id,
        }
        body = msgspec.convert(asked, ChatRequest)
        prepared = await prepare_chat(endpoint, body)
        endpoint.check_healthy()
        name = f"{job.id}-{len(job.conversation)}-{endpoint.new_request_id()}"
        answer = ChatAnswer(endpoint, body, name, name, int(time.time()))
        generation = Generation(
            endpoint.engine, endpoint.metrics, [prepared.prompt], prepared.params, name, prepared.parse
        )
        async with generation:
            found = await answer.whole(generation)
        said = found.choices[0].message
        calls = [] if said.tool_calls is UNSET else said.tool_calls
        outputs = [await self._call(str(call.function.name), call.function.arguments) for call in calls]
        replies = [
            {"role": "tool", "tool_call_id": call.id, "content": output}
            for call, output in zip(calls, outputs, strict=True)
        ]
        usage = msgspec.to_builtins(found.usage)
        messages = [msgspec.to_builtins(said), *msgspec.to_builtins(replies)]
        return {"messages": messages, "is_final": not calls, "usage": usage}

    async def _call(self, name: str, arguments: str) -> str:
        tool = self.tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}"
        try:
            return await asyncio.wait_for(asyncio.to_thread(tool.call, arguments), TOOL_S)
        except TimeoutError:
            return f"error: {name} did not end within {TOOL_S:g} s"
