"""Routes of files, fine-tuning and agents; without a state directory each refuses in one line."""

from __future__ import annotations

from aiohttp import web

from xdeepserve.api.openai.input_items import PAGE_QUERY
from xdeepserve.api.routes.route import FORM, Route
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.errors import InputError
from xdeepserve.jobs.agent_tools import read_tools
from xdeepserve.jobs.door import agents, files, fine_tuning
from xdeepserve.jobs.door.desk import run_desk
from xdeepserve.jobs.door.member_beat import run_member
from xdeepserve.jobs.door.pod_door import PodDoor
from xdeepserve.jobs.door.shared_pod import follow_pod, take_name
from xdeepserve.jobs.state_file import check_state

_FILES, _JOBS, _AGENTS = "/v1/files", "/v1/fine_tuning/jobs", "/v1/agent/jobs"

ROUTES = (
    Route("POST", _FILES, files.upload_file, "Keep examples: a form with file and purpose.", takes=FORM),
    Route("GET", _FILES, files.list_files, "List all files, in pages.", query=PAGE_QUERY),
    Route("GET", f"{_FILES}/{{id}}", files.get_file, "Show a file's record."),
    Route("GET", f"{_FILES}/{{id}}/content", files.get_content, "Return the uploaded content."),
    Route("DELETE", f"{_FILES}/{{id}}", files.delete_file, "Forget a file."),
    Route(
        "POST",
        _JOBS,
        fine_tuning.create_job,
        "Quantise or fine-tune the model (xdeepserve docs jobs).",
        fine_tuning.CreateJob,
    ),
    Route("GET", _JOBS, fine_tuning.list_jobs, "List all jobs, in pages.", query=PAGE_QUERY),
    Route("GET", f"{_JOBS}/{{id}}", fine_tuning.get_job, "Show a job, with its tasks."),
    Route("GET", f"{_JOBS}/{{id}}/events", fine_tuning.list_events, "List a job's events.", query=PAGE_QUERY),
    Route("POST", f"{_JOBS}/{{id}}/cancel", fine_tuning.cancel_job, "Cancel a job."),
    Route("DELETE", "/v1/models/{model:.+}", fine_tuning.delete_model, "Delete a model made by a job."),
    Route(
        "POST",
        _AGENTS,
        agents.create_agent_job,
        "Start an agent, which chats and calls tools (xdeepserve docs jobs).",
        agents.CreateAgentJob,
    ),
    Route("GET", _AGENTS, agents.list_agent_jobs, "List all agents, in pages.", query=PAGE_QUERY),
    Route("GET", f"{_AGENTS}/{{id}}", agents.get_agent_job, "Show an agent, with its turns."),
    Route(
        "GET",
        f"{_AGENTS}/{{id}}/events",
        agents.list_agent_events,
        "List an agent's events.",
        query=PAGE_QUERY,
    ),
    Route("POST", f"{_AGENTS}/{{id}}/cancel", agents.cancel_agent_job, "Cancel an agent."),
)


def furnish(app: web.Application) -> None:
    """Run the desk of jobs, the heartbeats of a member, and either side of a shared pod, while a server runs
    that has them."""
    options = app[ENDPOINT].options
    if options.share is not None:
        app.cleanup_ctx.append(PodDoor(app[MODELS], options.share).run)
    if options.pod is not None:
        app.middlewares.append(take_name)
        app.cleanup_ctx.append(follow_pod)
    elif options.state is not None:
        app.cleanup_ctx.append(run_desk)
    if options.member is not None:
        app.cleanup_ctx.append(run_member)


def check_options(options: ServerOptions) -> None:
    """Raise InputError for a state directory or tools that cannot be used, before a model is loaded."""
    if options.state is not None:
        check_state(options.state)
    if options.pod is not None and options.uds is None:
        raise InputError("--pod needs --uds: a job executor trusts its door, which others could not imitate")
    if options.tools is not None:
        if options.state is None:
            raise InputError("--tools needs --state DIR, where the jobs of agents are kept")
        read_tools(options.tools)
