"""Outlines: its models for vLLM's server and for OpenAI's endpoint, with types, regexes and grammars."""

from __future__ import annotations

import gc
from typing import Literal

import openai
import outlines
from features import BASE_URL, LONG, MODEL, absent, feature, hanging_up, version
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
models = {"vllm": outlines.from_vllm(client, MODEL), "openai": outlines.from_openai(client, MODEL)}
GRAMMAR = 'start: "glad" | "sad" " " NUMBER\nNUMBER: /[0-9]/'
version("outlines")
absent("text responses", "the client calls `/v1/chat/completions` only")
absent("tools", "the client has no tools")

for name, model in models.items():

    @feature("chat", f"{name}: a text")
    def _(model: outlines.Model = model) -> None:
        assert model("Who is glad?", max_tokens=16)

    @feature("stream", f"{name}: stream")
    def _(model: outlines.Model = model) -> None:
        text = model("Who is glad?", max_tokens=16, temperature=0)
        assert "".join(model.stream("Who is glad?", max_tokens=16, temperature=0)) == text

    @feature("structured", f"{name}: a pydantic model")
    def _(model: outlines.Model = model) -> None:
        assert Person.model_validate_json(model("Who is glad?", Person, max_tokens=300))

    @feature("cancel", f"{name}: stream, left")
    def _(model: outlines.Model = model) -> None:
        with hanging_up():
            parts = model.stream("Who is glad?", **LONG)
            assert isinstance(next(parts), str)  # the first may be empty
            parts.close()
            gc.collect()  # Outlines does not close the stream that it reads


@feature("structured", "vllm: Literal, int, Regex")
def _() -> None:
    assert models["vllm"]("Who is glad?", Literal["glad", "sad"], max_tokens=20) in ("glad", "sad")
    int(models["vllm"]("How many?", Regex("[1-9][0-9]{0,3}"), max_tokens=20))


@feature("structured", "vllm: CFG")
def _() -> None:
    assert models["vllm"]("Who is glad?", CFG(GRAMMAR), max_tokens=20).startswith(("glad", "sad"))
