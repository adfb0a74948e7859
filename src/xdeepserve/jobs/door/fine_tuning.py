"""/v1/fine_tuning/jobs in OpenAI's format: supervised fine-tuning, and post-training quantisation as a method
of its own.

    {"model": "tiny", "training_file": "file-00000001", "suffix": "mine",
     "method": {"type": "quantization",
                "quantization": {"hyperparameters": {"algorithm": "smoothquant+gptq", "samples": 64}}}}
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.openai.input_items import page
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.errors import InputError, RequestError, abridged, meant
from xdeepserve.jobs.door.desk import cancelled, desk_of, number_of, shown_event
from xdeepserve.jobs.door.files import find_file
from xdeepserve.jobs.door.model_shelf import source_of
from xdeepserve.jobs.job_records import JobOrder, JobRecord, TrainingSettings
from xdeepserve.jobs.task_work import KINDS, TRAINING_KINDS
from xdeepserve.jobs.training import check_extra
from xdeepserve.quant.method import METHODS

QUANTIZATION, SUPERVISED = "quantization", "supervised"
MAX_SAMPLES = 4096
MAX_SUFFIX_CHARS = 64


class QuantizationSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of quantisation: a method of `xdeepserve quantize`, and the number of examples to begin
    with."""

    algorithm: str = "smoothquant+gptq"
    samples: int = 64


class QuantizationMethod(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's level between a method's type and its settings."""

    hyperparameters: QuantizationSettings = msgspec.field(default_factory=QuantizationSettings)


class SupervisedMethod(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's level between a method's type and its settings."""

    hyperparameters: TrainingSettings = msgspec.field(default_factory=TrainingSettings)


class JobMethod(msgspec.Struct, forbid_unknown_fields=True):
    """Method of a job. OpenAI's other methods are known, and refused."""

    type: str
    quantization: QuantizationMethod = msgspec.field(default_factory=QuantizationMethod)
    supervised: SupervisedMethod | None = None
    dpo: Any = None
    reinforcement: Any = None


class CreateJob(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/fine_tuning/jobs. `seed` has no effect, because nothing is drawn at random."""

    model: str
    training_file: str
    method: JobMethod = msgspec.field(default_factory=lambda: JobMethod(type=SUPERVISED))
    validation_file: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    seed: int | None = None
    hyperparameters: Any = None
    integrations: Any = None


async def create_job(request: web.Request) -> web.Response:
    """Handle POST /v1/fine_tuning/jobs: queue a job."""
    desk = desk_of(request)
    body = await read_body(request, CreateJob)
    models = request.app[MODELS]
    endpoint = models.find(body.model)
    if endpoint is not models.first:
        raise RequestError(
            f"{abridged(body.model)} was made by a job: jobs work on {models.first.model_name}", param="model"
        )
    trains, settings = _training(body), _checked(body)
    training = find_file(request, body.training_file, "training_file").number
    validation = body.validation_file and find_file(request, body.validation_file, "validation_file").number
    order = JobOrder(
        model=body.model,
        source=source_of(endpoint.engine),
        training=training,
        validation=validation or None,
        algorithm=settings.algorithm,
        samples=settings.samples,
        suffix=body.suffix,
        metadata=body.metadata,
        training_settings=trains,
    )
    kinds = KINDS if trains is None else TRAINING_KINDS
    return json_response(shown_job(desk.store.add_job(order, kinds)))


def _training(body: CreateJob) -> TrainingSettings | None:
    """Read the settings of a training job; None for a quantising job. Raises RequestError."""
    kind = body.method.type
    if kind not in (QUANTIZATION, SUPERVISED):
        raise RequestError(
            f"method.type {abridged(kind)}: this server quantises ({QUANTIZATION}) and trains ({SUPERVISED})",
            param="method",
            code="unsupported_value",
        )
    for name in {SUPERVISED, "dpo", "reinforcement"} - {kind}:
        if getattr(body.method, name) is not None:
            raise RequestError(f"method.{name} does not go with {kind}", param=f"method.{name}")
    if kind == QUANTIZATION:
        return None
    try:
        check_extra()
    except InputError as error:
        raise RequestError(str(error), param="method", code="unsupported_value") from None
    settings = (body.method.supervised or SupervisedMethod()).hyperparameters
    if settings.wrong is not None:
        raise RequestError(settings.wrong, param=f"method.{SUPERVISED}.hyperparameters")
    return settings


def _checked(body: CreateJob) -> QuantizationSettings:
    """Read the settings of a quantising job; other jobs have them, too. Raises RequestError."""
    settings = body.method.quantization.hyperparameters
    for name in ("hyperparameters", "integrations"):
        if getattr(body, name):
            raise RequestError(f"{name} is not served; settings stand in method", param=name)
    where = f"method.{QUANTIZATION}.hyperparameters"
    if settings.algorithm not in METHODS:
        known = f"known are {', '.join(METHODS)}{meant(settings.algorithm, METHODS)}"
        raise RequestError(
            f"unknown algorithm {abridged(settings.algorithm)}: {known}", param=f"{where}.algorithm"
        )
    if not 1 <= settings.samples <= MAX_SAMPLES:
        raise RequestError(
            f"samples must be 1 to {MAX_SAMPLES}, found {settings.samples}", param=f"{where}.samples"
        )
    suffix = body.suffix
    if suffix is not None and not (
        0 < len(suffix) <= MAX_SUFFIX_CHARS and suffix.isascii() and suffix.replace("-", "").isalnum()
    ):
        raise RequestError(
            f"suffix must have 1 to {MAX_SUFFIX_CHARS} letters, digits and hyphens, found {abridged(suffix)}",
            param="suffix",
        )
    return settings


async def list_jobs(request: web.Request) -> web.Response:
    """Handle GET /v1/fine_tuning/jobs: the last job first, in pages by `after` and `limit`."""
    jobs = [each for each in desk_of(request).store.jobs() if each.order.agent is None]
    return json_response(page([shown_job(each) for each in jobs], request.query))


async def get_job(request: web.Request) -> web.Response:
    """Handle GET /v1/fine_tuning/jobs/ID: show a job."""
    return json_response(shown_job(_named(request)))


async def list_events(request: web.Request) -> web.Response:
    """Handle GET /v1/fine_tuning/jobs/ID/events: the last event first, in pages by `after` and `limit`."""
    events = desk_of(request).store.events(_named(request).number)
    return json_response(page([shown_event(each) for each in events], request.query))


async def cancel_job(request: web.Request) -> web.Response:
    """Handle POST /v1/fine_tuning/jobs/ID/cancel: the job's process ends within a moment. Refused when the
    job is over."""
    return json_response(shown_job(cancelled(request, _named(request))))


async def delete_model(request: web.Request) -> web.Response:
    """Handle DELETE /v1/models/NAME: remove a model that a job has made, with its files."""
    desk, name, models = desk_of(request), request.match_info["model"], request.app[MODELS]
    if models.find(name) is models.first:
        raise RequestError(f"{abridged(name)} was not made by a job, and stays", param="model")
    await desk.shelf.unload(name)
    desk.store.delete_model(name)
    return json_response({"id": name, "object": "model", "deleted": True})


def _named(request: web.Request) -> JobRecord:
    job_id = request.match_info["id"]
    number = number_of(job_id, "ftjob-")
    found = None if number is None else desk_of(request).store.job(number)
    if found is None or found.order.agent is not None:
        raise ApiError(404, f"there is no job {abridged(job_id)}", param="job_id", code="job_not_found")
    return found


def shown_job(job: JobRecord) -> dict[str, Any]:
    """Convert a job to OpenAI's format, with its tasks added."""
    order, kind = job.order, QUANTIZATION
    settings: Any = {"algorithm": order.algorithm, "samples": order.samples}
    if order.training_settings is not None:
        kind, settings = SUPERVISED, order.training_settings
    results = [task.result or {} for task in job.tasks]
    error = None if job.reason is None else {"code": "job_failed", "message": job.reason, "param": None}
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "status": job.state,
        "error": error,
        "model": order.model,
        "fine_tuned_model": job.result_name if job.state == "succeeded" else None,
        "training_file": f"file-{order.training:08d}",
        "validation_file": None if order.validation is None else f"file-{order.validation:08d}",
        "method": {"type": kind, kind: {"hyperparameters": msgspec.to_builtins(settings)}},
        "hyperparameters": {},
        "integrations": [],
        "metadata": order.metadata,
        "organization_id": "xdeepserve",
        "result_files": [],
        "seed": 0,
        "trained_tokens": next(
            (each["trained_tokens"] for each in results if "trained_tokens" in each), None
        ),
        "estimated_finish": None,
        "tasks": msgspec.to_builtins(job.tasks),
    }
