"""Simon Willison's `llm`, by its list of servers like OpenAI's: chats, streams, tools, schemas."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path

from features import BASE_URL, LONG, MODEL, PERSON, TOKENIZER, check_person, feature, hanging_up, version

HOME = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(HOME)
SERVER = {"model_id": "served", "model_name": MODEL, "api_base": f"{BASE_URL}/v1"}
ABLE = {"supports_tools": True, "supports_schema": True, "can_stream": True}
(HOME / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            SERVER | ABLE,
            SERVER | {"model_id": "texts", "completion": True},
            SERVER | ABLE | {"model_id": "responses", "responses": True},
        ]
    )
)

import llm  # noqa: E402  # it reads that list when it is imported

HI = "Who is glad?"
model = llm.get_model("served")
model.key = "none"
version("llm")


def greet(mood: str) -> str:
    """Greet a person."""
    return mood


@feature("text", "prompt")
def _() -> None:
    texts = llm.get_model("texts")
    texts.key = "none"
    assert texts.prompt("Once upon a time", stream=False, max_tokens=16).text()


@feature("responses", "prompt, whole and streamed")
def _() -> None:
    asked = llm.get_model("responses")
    asked.key = "none"
    text = asked.prompt(HI, stream=False, max_tokens=16, temperature=0).text()
    assert text
    assert "".join(asked.prompt(HI, stream=True, max_tokens=16, temperature=0)) == text


@feature("chat", "prompt, conversation")
def _() -> None:
    talk = model.conversation()
    for _turn in range(2):
        assert talk.prompt(HI, stream=False, max_tokens=16, temperature=0).usage().output


@feature("stream", "prompt")
def _() -> None:
    text = model.prompt(HI, stream=False, max_tokens=16, temperature=0).text()
    assert "".join(model.prompt(HI, stream=True, max_tokens=16, temperature=0)) == text


@feature("cancel", "stream, left")
def _() -> None:
    """The client does not close its stream: Python's collection of it does. An end is forbidden by its token,
    since the client cannot send `ignore_eos`."""
    end = json.loads((Path(TOKENIZER) / "config.json").read_text())["eos_token_id"]
    with hanging_up():
        answer = model.prompt(
            HI, stream=True, max_tokens=LONG["max_tokens"], logit_bias=json.dumps({str(end): -100})
        )
        next(iter(answer))
        del answer
        gc.collect()


@feature("structured", "schema")
def _() -> None:
    check_person(model.prompt(HI, schema=PERSON, stream=False, max_tokens=300).text())


@feature("tools", "offered, streamed and whole")
def _() -> None:
    tools = [llm.Tool.function(greet)]
    for stream in (False, True):
        answer = model.prompt(HI, tools=tools, stream=stream, max_tokens=200, temperature=0)
        answer.text()
        assert all(call.name == "greet" for call in answer.tool_calls())
