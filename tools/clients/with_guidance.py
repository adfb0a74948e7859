"""Guidance: its remote models for vLLM's server and for OpenAI's endpoint."""

from __future__ import annotations

from typing import Literal

import guidance
from features import BASE_URL, MODEL, PERSON, absent, check_person, feature, version
from guidance.models.experimental import VLLMModel

at = {"base_url": f"{BASE_URL}/v1", "api_key": "none", "echo": False}
models = {"vllm": VLLMModel, "openai": guidance.models.OpenAI}
version("guidance")
absent("text responses", "the client calls `/v1/chat/completions` only")
absent("cancel", "a thread of the client reads the stream to its end, whether anybody wants it or not")


def asked(kind: str) -> guidance.models.Model:
    """A model that has been asked a question."""
    state = models[kind](MODEL, **at)
    with guidance.user():
        state += "Who is glad?"
    return state


@guidance.guidance
def answered(state: guidance.models.Model) -> guidance.models.Model:
    """Answer; a stream runs in a thread of its own, so the role is opened here."""
    with guidance.assistant():
        return state + guidance.gen("text", max_tokens=16)


for kind in models:

    @feature("chat", f"{kind}: gen")
    def _(kind: str = kind) -> None:
        state = asked(kind)
        with guidance.assistant():
            state += guidance.gen("text", max_tokens=16)
        assert state["text"]

    @feature("structured", f"{kind}: json")
    def _(kind: str = kind) -> None:
        state = asked(kind)
        with guidance.assistant():
            state += guidance.json("found", schema=PERSON)
        check_person(state["found"])

    @feature("tools", f"{kind}: gen, required")
    def _(kind: str = kind) -> None:
        """Guidance sends no limit and no temperature beside tools: for some seeds the answer has no end."""
        moods = []

        def greet(mood: Literal["glad", "sad"]) -> str:
            """Greet a person."""
            moods.append(mood)
            return f"You are {mood}."

        state = asked(kind)
        with guidance.assistant():
            state += guidance.gen(tools=[greet], tool_choice="required")
        assert moods, str(state)

    @feature("stream", f"{kind}: stream")
    def _(kind: str = kind) -> None:
        texts = [str(part) for part in asked(kind).stream() + answered()]
        assert len(texts) > 2, texts


@feature("structured", "vllm: select, regex, text between")
def _() -> None:
    form = "He is " + guidance.select(["glad", "sad"], name="mood") + guidance.gen("age", regex="[1-9][0-9]?")
    state = asked("vllm")
    with guidance.assistant():
        state += form
    assert state["mood"] in ("glad", "sad")
    int(state["age"])
