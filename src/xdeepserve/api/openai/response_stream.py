"""Answers of /v1/responses: output items, and the events in which they arise.

An answer is a list of items: reasoning, messages, and calls of functions. `Items` makes them from the deltas
of a generation, with an event of OpenAI's for each step. A whole answer is the sum of its events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xdeepserve.api.answers.responses import ChatTokenLogprob
from xdeepserve.engine.serving.request import OutputDelta
from xdeepserve.parsing.call_grammar import ParsedCall

Event = dict[str, Any]
Item = dict[str, Any]


class Items:
    """Items of an answer, of which the last may be open. `answer_id` makes their ids unique."""

    def __init__(self, answer_id: str) -> None:
        self.items: list[Item] = []
        self._answer_id = answer_id
        self._is_open = False
        self._scores: list[ChatTokenLogprob] = []  # of tokens whose text has not come yet

    def add(self, delta: OutputDelta, scores: Sequence[ChatTokenLogprob] = ()) -> Iterator[Event]:
        """Yield the events of a delta. `scores` are the log probabilities of its tokens; messages keep those
        of theirs."""
        before = [] if delta.num_reasoning else self._scores  # what was held before a reasoning was its tag
        self._scores = [*before, *scores[delta.num_reasoning :]]
        if delta.reasoning:
            yield from self._extend("reasoning", delta.reasoning)
        if delta.text:
            yield from self._extend("message", delta.text)
        if delta.tool_calls:
            self._scores = []
        for call in delta.tool_calls:
            yield from self._add_call(call)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the open item, and yield its final events."""
        if not self._is_open:
            return
        self._is_open = False
        item, index = self.items[-1], len(self.items) - 1
        item["status"] = status
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            done = {key: item[key] for key in ("arguments", "name")}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        else:
            part, at = item["content"][0], {**at, "content_index": 0}
            if item["type"] == "message":
                yield {
                    "type": "response.output_text.done",
                    **at,
                    "text": part["text"],
                    "logprobs": part["logprobs"],
                }
            else:
                yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _open(self, item: Item) -> Iterator[Event]:
        yield from self.close()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        item["id"] = f"{prefix}_{self._answer_id}-{len(self.items)}"
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        # An event is encoded before the next one is made, so that what it shows may grow afterwards.
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Append text to a message or to the reasoning; open a new item if necessary."""
        if not (self._is_open and self.items[-1]["type"] == kind):
            yield from self._open(_empty(kind))
            item = self.items[-1]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part if kind == "message" else {"type": "reasoning_text", "text": ""})
            yield {"type": "response.content_part.added", **self._place(), "part": item["content"][0]}
        self.items[-1]["content"][0]["text"] += text
        event = {**self._place(), "delta": text}
        if kind == "message":
            scores, self._scores = self._scores, []
            self.items[-1]["content"][0]["logprobs"] += scores
            yield {"type": "response.output_text.delta", **event, "logprobs": scores}
        else:
            yield {"type": "response.reasoning_text.delta", **event}

    def _add_call(self, call: ParsedCall) -> Iterator[Event]:
        call_id = call.id or f"call_{self._answer_id}-{call.index}"
        yield from self._open(
            {"type": "function_call", "call_id": call_id, "name": call.name, "arguments": ""}
        )
        if call.arguments:
            item = self.items[-1]
            item["arguments"] += call.arguments
            at = {"item_id": item["id"], "output_index": len(self.items) - 1}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": call.arguments}

    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        return {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _empty(kind: str) -> Item:
    if kind == "message":
        return {"type": "message", "role": "assistant", "content": []}
    return {"type": "reasoning", "summary": [], "content": []}
