"""/v1/files: files of training examples, a JSON object a line (jobs/training_text.py)."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.openai.input_items import page
from xdeepserve.api.routes.body import BODY_SECONDS
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.errors import RequestError, abridged
from xdeepserve.jobs.door.desk import desk_of, number_of
from xdeepserve.jobs.job_records import StoredFile
from xdeepserve.jobs.training_text import read_lines

PURPOSES = ("fine-tune",)
MAX_FILE_BYTES = 16 << 20
MAX_ALL_BYTES = 256 << 20
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255


async def upload_file(request: web.Request) -> web.Response:
    """Handle POST /v1/files: a form with `file` and `purpose`. Every line is checked before the file is
    kept."""
    store = desk_of(request).store
    with tempfile.TemporaryDirectory(dir=store.directory, prefix="upload-") as folder:
        content = Path(folder, "content")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                name, purpose = await _read_form(request, content)
        except TimeoutError:
            raise ApiError(
                408, f"the form did not come within {BODY_SECONDS:g} s", code="request_timeout"
            ) from None
        if purpose not in PURPOSES:
            raise RequestError(
                f"purpose must be {' or '.join(PURPOSES)}, found {abridged(purpose)}", param="purpose"
            )
        kept = sum(each.num_bytes for each in store.files())
        await asyncio.to_thread(_check, content, kept)
        return json_response(shown_file(store.add_file(name, purpose, content)))


async def _read_form(request: web.Request, content: Path) -> tuple[str, str | None]:
    """Read the form; write the file to `content`, and return its name and the purpose. Raises RequestError or
    ApiError."""
    name: str | None = None
    purpose: str | None = None
    try:
        async for part in await request.multipart():
            field = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or field not in ("file", "purpose"):
                raise RequestError(
                    f"unknown field {abridged(field)}: file and purpose are known",
                    param=field,
                    code="unknown_parameter",
                )
            if field == "file":
                name = (part.filename or "file")[:MAX_NAME_CHARS]
                await _save(part, content)
            else:
                purpose = (await part.read_chunk(MAX_FIELD_BYTES)).decode(errors="replace")
    except (ValueError, AssertionError, web.RequestPayloadError, HttpProcessingError) as error:
        raise RequestError(f"the form could not be read: {' '.join(str(error).split())}") from None
    for field, found in (("file", name), ("purpose", purpose)):
        if found is None:
            raise RequestError(f"{field} is required", param=field)
    assert name is not None
    return name, purpose


async def _save(part: BodyPartReader, content: Path) -> None:
    size = 0
    with content.open("wb") as file:
        while chunk := await part.read_chunk(1 << 16):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise ApiError(
                    413, f"a file has {MAX_FILE_BYTES} bytes at most", param="file", code="request_too_large"
                )
            file.write(chunk)


def _check(content: Path, kept: int) -> None:
    """Raise RequestError for a line that is no example, or if all files, with `kept` bytes so far, become too
    large."""
    for _ in read_lines(content):
        pass
    if kept + content.stat().st_size > MAX_ALL_BYTES:
        raise RequestError(
            f"all files together have {MAX_ALL_BYTES} bytes at most, {kept} are there: delete some",
            param="file",
        )


async def list_files(request: web.Request) -> web.Response:
    """Handle GET /v1/files: list the files, in pages."""
    files = [shown_file(each) for each in desk_of(request).store.files()]
    return json_response(page(files, request.query))


async def get_file(request: web.Request) -> web.Response:
    """Handle GET /v1/files/ID: show a file's record."""
    return json_response(shown_file(_named(request)))


async def get_content(request: web.Request) -> web.Response:
    """Handle GET /v1/files/ID/content: return the uploaded content."""
    path = desk_of(request).store.file_path(_named(request).number)
    return web.Response(body=path.read_bytes(), content_type="application/octet-stream")


async def delete_file(request: web.Request) -> web.Response:
    """Handle DELETE /v1/files/ID. Refused while a job needs the file."""
    store, file = desk_of(request).store, _named(request)
    for job in store.jobs():
        if not job.is_over and file.number in (job.order.training, job.order.validation):
            raise RequestError(f"{file.id} is needed by {job.id}, which is {job.state}", param="file_id")
    store.delete_file(file.number)
    return json_response({"id": file.id, "object": "file", "deleted": True})


def find_file(request: web.Request, file_id: str, param: str) -> StoredFile:
    """Find the file of an id. Raises ApiError if there is none."""
    number = number_of(file_id, "file-")
    found = None if number is None else desk_of(request).store.file(number)
    if found is None:
        raise ApiError(404, f"there is no file {abridged(file_id)}", param=param, code="file_not_found")
    return found


def _named(request: web.Request) -> StoredFile:
    return find_file(request, request.match_info["id"], "file_id")


def shown_file(file: StoredFile) -> dict[str, Any]:
    """Convert a file's record to OpenAI's format."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None,
    }
