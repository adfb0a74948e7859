"""Walkthrough 23: a request that is no chat: quantise this model with my text, and serve what comes of it.

A server with a state directory gets a file and an order for a job (DeepServe 3: request, job, task). Each
task is a process of its own; the last one has the new model join the pod, with dies of its own, while the
first model goes on answering. Then the directory is looked at: who leads, and what a standby would find.

    python examples/23_jobs.py
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.jobs.job_states import JOB_MOVES, TASK_MOVES
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.llm import build_engine
from xdeepserve.progress import working

QUESTION = [{"role": "user", "content": "Tell me a story about a cat."}]
SECONDS = 600.0  # of wall time, for kernels may have to be compiled
METHOD = {"type": "quantization", "quantization": {"hyperparameters": {"algorithm": "smoothquant+gptq"}}}


def show_tables() -> None:
    for what, moves in (("job", JOB_MOVES), ("task", TASK_MOVES)):
        for state, later in moves.items():
            print(f"  {what:4}  {state:9}  -> {', '.join(later) or '(its end)'}")


def examples() -> bytes:
    """Sums as chats, a JSON object a line."""
    lines = []
    for i in range(20):
        asked = {"role": "user", "content": f"What is {i} + {2 * i + 1}?"}
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": f"{3 * i + 1}"}]}))
    return "\n".join(lines).encode()


def rounded(result: Any) -> Any:
    """A task's result for the eye: numbers with four digits, and of the lists alone their lengths."""
    if isinstance(result, dict):
        return ", ".join(f"{name} {rounded(value)}" for name, value in result.items())
    if isinstance(result, list):
        return f"({len(result)} of them)"
    return f"{result:.4g}" if isinstance(result, float) else result


class Client:
    """Talks HTTP with the server, as anybody would; the official `openai` client does the same."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def __call__(self, method: str, path: str, **more: Any) -> Any:
        async with self.session.request(method, self.url + path, **more) as answer:
            return await answer.json()

    async def chat(self, model: str) -> str:
        body = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        answer = await self("POST", "/chat/completions", json=body)
        return str(answer["choices"][0]["message"]["content"])


async def follow(call: Client, job_id: str) -> dict[str, Any]:
    """Print events as they come, until the job is over; meanwhile the first model answers."""
    num_shown = num_answers = 0
    async with asyncio.timeout(SECONDS):
        while True:
            job: dict[str, Any] = await call("GET", f"/fine_tuning/jobs/{job_id}")
            events = await call("GET", f"/fine_tuning/jobs/{job_id}/events?order=asc&limit=100")
            for event in events["data"][num_shown:]:
                if event["data"] is None or event["message"].endswith("is done"):
                    print(f"  {event['message']}")
            num_shown = len(events["data"])
            if job["finished_at"] is not None:
                print(f"  ({num_shown} events; meanwhile tiny answered: {num_answers > 0})")
                return job
            await call.chat("tiny")
            num_answers += 1


async def visit(call: Client) -> None:
    form = aiohttp.FormData({"purpose": "fine-tune"})
    form.add_field("file", examples(), filename="sums.jsonl")
    file = await call("POST", "/files", data=form)
    print(f"\nkept {file['id']}: {file['filename']}, {file['bytes']} bytes")
    order = {"model": "tiny", "training_file": file["id"], "suffix": "sums", "method": METHOD}
    job = await call("POST", "/fine_tuning/jobs", json=order)
    print(f"{job['id']} is {job['status']}; its tasks: {', '.join(t['kind'] for t in job['tasks'])}")
    with working("Following the job"):
        job = await follow(call, job["id"])
    for task in job["tasks"]:
        line = f"  {task['kind']:8} {rounded(task['result'])}"
        print(textwrap.fill(line, 100, subsequent_indent=" " * 11))
    models = [model["id"] for model in (await call("GET", "/models"))["data"]]
    print(f"\nmodels: {', '.join(models)}")
    for model in models:
        print(f"  {model}: {await call.chat(model)!r}")
    refused = await call("POST", f"/fine_tuning/jobs/{job['id']}/cancel")
    print(f"to cancel it now: {refused['error']['message']}")
    order["training_file"] = "file-00000007"
    refused = await call("POST", "/fine_tuning/jobs", json=order)
    print(f"an order for another file: {refused['error']['message']}")


def show_directory(state: Path) -> None:
    """What the next server finds, be it this one again or a standby."""
    store = JobStore(state, time.time)
    (job,) = store.jobs()
    print(f"\nin the directory: {job.id}, {job.state}; to be served: {', '.join(store.models())}")
    lease = store.take_lease("the next one", 10)
    assert lease is not None, "the server has given up its lease"
    print(f"the next server leads in term {lease.term}; a second one beside it would stand by: ", end="")
    print(f"its lease is {store.take_lease('a second one', 10)}")
    store.close()


async def main() -> None:
    print("from which state a job or a task may go to which:")
    show_tables()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state")
        engine = build_engine("tiny", "colocated", "int8", overrides=["dies=2"], warm_up=True)
        runner = web.AppRunner(build_app(engine, ServerOptions(state=state)), handler_cancellation=True)
        with working("Starting the server", runs_int8=True):
            await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                await visit(Client(session, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"))
            holders = sorted(set(engine.plan.pod.holders.values()))
            print(f"who holds dies of the pod: {', '.join(holders)}")
        finally:
            await runner.cleanup()
        show_directory(state)


if __name__ == "__main__":
    asyncio.run(main())
