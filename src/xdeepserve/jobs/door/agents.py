"""/v1/agent/jobs: agent serving as a job, a bounded loop of chat tasks with registered tools (DeepServe 3).

{"model": "tiny", "messages": [{"role": "user", "content": "What is the weather in Oslo today?"}],
 "tools": ["get_weather"], "max_turns": 4}
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.openai.input_items import page
from xdeepserve.api.openai.requests import ChatMessage
from xdeepserve.api.routes.body import converted, read_body
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.errors import RequestError, abridged
from xdeepserve.jobs.door.desk import cancelled, desk_of, number_of, shown_event
from xdeepserve.jobs.job_records import AgentOrder, JobOrder, JobRecord

MAX_TURNS = 32
TURN = "turn"


class CreateAgentJob(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/agent/jobs. `tools` are names of tools that the server has (`--tools`)."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[str] = []
    max_turns: int = 8
    max_tokens: int = 128
    temperature: float = 0.0
    metadata: dict[str, str] | None = None


async def create_agent_job(request: web.Request) -> web.Response:
    """Handle POST /v1/agent/jobs: queue a job for an agent."""
    desk = desk_of(request)
    body = await read_body(request, CreateAgentJob)
    request.app[MODELS].find(body.model)
    known = desk.turns.tools
    for name in body.tools:
        if name not in known:
            there = f"this server has {', '.join(known)}" if known else "start the server with --tools FILE"
            raise RequestError(f"there is no tool {abridged(name)}: {there}", param="tools")
    _check_messages(body.messages)
    for field, most in (("max_turns", MAX_TURNS), ("max_tokens", 1 << 20)):
        if not 1 <= (value := getattr(body, field)) <= most:
            raise RequestError(f"{field} must be 1 to {most}, found {value}", param=field)
    agent = AgentOrder(body.messages, body.tools, body.max_tokens, body.temperature)
    order = JobOrder(model=body.model, source="", training=0, agent=agent, metadata=body.metadata)
    return json_response(shown(desk.store.add_job(order, (TURN,) * body.max_turns)))


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise RequestError for messages unfit for any chat."""
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    try:
        converted(messages, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise RequestError(f"messages: {str(error).replace('`', '')}", param="messages") from None


async def list_agent_jobs(request: web.Request) -> web.Response:
    """Handle GET /v1/agent/jobs: the last job first, in pages by `after` and `limit`."""
    jobs = [each for each in desk_of(request).store.jobs() if each.order.agent is not None]
    return json_response(page([shown(each) for each in jobs], request.query))


async def get_agent_job(request: web.Request) -> web.Response:
    """Handle GET /v1/agent/jobs/ID: show an agent's job."""
    return json_response(shown(_named(request)))


async def list_agent_events(request: web.Request) -> web.Response:
    """Handle GET /v1/agent/jobs/ID/events: the last event first, in pages by `after` and `limit`."""
    events = desk_of(request).store.events(_named(request).number)
    return json_response(
        page([shown_event(each) | {"object": "agent.job.event"} for each in events], request.query)
    )


async def cancel_agent_job(request: web.Request) -> web.Response:
    """Handle POST /v1/agent/jobs/ID/cancel. Refused when the job is over."""
    return json_response(shown(cancelled(request, _named(request))))


def _named(request: web.Request) -> JobRecord:
    job_id = request.match_info["id"]
    number = number_of(job_id, "agentjob-")
    found = None if number is None else desk_of(request).store.job(number)
    if found is None or found.order.agent is None:
        raise ApiError(404, f"there is no job {abridged(job_id)}", param="job_id", code="job_not_found")
    return found


def shown(job: JobRecord) -> dict[str, Any]:
    """Convert a job to JSON, with the conversation so far; `output` is the final answer."""
    agent, messages = job.order.agent, job.conversation
    assert agent is not None
    return {
        "id": job.id,
        "object": "agent.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "status": job.state,
        "error": None if job.reason is None else {"code": "job_failed", "message": job.reason, "param": None},
        "model": job.order.model,
        "tools": agent.tools,
        "max_turns": len(job.tasks),
        "messages": messages,
        "output": messages[-1]["content"] if job.state == "succeeded" else None,
        "metadata": job.order.metadata,
        "tasks": msgspec.to_builtins(job.tasks),
    }
