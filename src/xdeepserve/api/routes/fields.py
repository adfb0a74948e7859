"""Fields of requests that are known and not served, and the one rule for all fields that are not served.

Types of requests (api/openai/requests.py, response_items.py) have the fields that this server acts on. Any
other field that is not null is
- taken without a word if it comes from an answer of this server, or from a library that keeps it beside one
  (`OURS`);
- refused by name if it would change the answer (`GENERATING`, `CHANGES`), unless its value asks for nothing,
  and if it is like a field that is served: a misspelt field would change nothing, unseen;
- else ignored: the answer's header `x-ignored-fields` names it, and so does the log, once. `HARMLESS` lists
  those that clients are known to send. A strict server refuses these as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import web

from xdeepserve.errors import RequestError, meant

MAX_NAME_CHARS = 100
MAX_NAMED = 32  # fields in a header
LIKE = 0.8  # share of letters in common above which one name is taken for a misspelt other


class Unserved(NamedTuple):
    """A field that would change the answer: values, beside null, that ask for nothing, and what to use."""

    neutral: tuple[Any, ...] = ()
    use: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing. JSON has one type of numbers: 1 and 1.0 are equal, true is
        neither."""
        return any(value == each and (value is each or not isinstance(value, bool)) for each in self.neutral)


def _none(*names: str) -> dict[str, Unserved]:
    return dict.fromkeys(names, Unserved())


_TEMPLATE = Unserved(use="; what the chat template knows goes into chat_template_kwargs")
_LIMITS = (
    *("max_completion_tokens", "max_length", "max_new_tokens", "max_tokens_to_sample", "n_predict"),
    "num_predict",
)
_LIMIT = Unserved(use="; use max_tokens")
_FORM = Unserved(("",), "; use structured_outputs")
_FORMAT = Unserved(use="; use response_format")
# Of every endpoint that generates, unless it serves the field or has words of its own for it in `CHANGES`.
GENERATING: Mapping[str, Unserved] = {
    **_none("audio", "cache_salt", "chat_template", "guided_whitespace_pattern"),
    **_none("logits_processor_pattern", "prompt_embeds"),
    "detokenize": Unserved((True,)),
    "documents": Unserved(([],)),
    "enable_thinking": _TEMPLATE,
    "function_call": Unserved(("none", "auto"), "; use tool_choice"),
    "functions": Unserved(([],), "; use tools"),
    "kv_transfer_params": Unserved(({},)),
    "length_penalty": Unserved((1,)),
    "logits_processors": Unserved(([],)),
    "modalities": Unserved((["text"],)),
    "suffix": Unserved(("",)),
    "thinking": _TEMPLATE,
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget"), Unserved(use=": no limit is for the reasoning alone")
    ),
    "use_beam_search": Unserved((False,)),
    "verbosity": Unserved(("medium",)),
    "vllm_xargs": Unserved(({},)),
    "web_search_options": Unserved(),  # an empty object switches the search on
    # Other servers' fields: those of llama.cpp, Ollama, SGLang, TGI, OpenRouter and transformers that draw
    # other tokens, end elsewhere or show another prompt.
    **_none("adapter_id", "custom_logit_processor", "logit_bias_exp", "structural_tag"),
    **dict.fromkeys(("custom_params", "options", "session_params"), Unserved(({},))),
    **dict.fromkeys(
        ("decoder_input_details", "details", "raw", "return_full_text", "return_hidden_states", "watermark"),
        Unserved((False,)),
    ),
    **dict.fromkeys(("ebnf", "format", "grammar", "regex"), _FORM),
    **dict.fromkeys(("lora", "plugins", "samplers", "transforms"), Unserved(([],))),
    **dict.fromkeys(("lora_path", "template"), Unserved(("",))),
    **dict.fromkeys((*_LIMITS, "max_output_tokens"), _LIMIT),
    **dict.fromkeys(("typ_p", "typical", "typical_p"), Unserved((1,), "; use top_p or min_p")),
    "do_sample": Unserved((True,), "; temperature 0 draws the likeliest token"),
    "dry_multiplier": Unserved((0,)),
    "dynatemp_exponent": Unserved((1,)),
    "dynatemp_range": Unserved((0,)),
    "id_slot": Unserved((-1,)),
    "json_schema": Unserved(use="; use structured_outputs"),
    "min_new_tokens": Unserved((0,), "; use min_tokens"),
    "mirostat": Unserved((0,)),
    "n_probs": Unserved((0,), "; use logprobs"),
    "no_repeat_ngram_size": Unserved((0,)),
    "num_beams": Unserved((1,)),
    "num_return_sequences": Unserved((1,), "; use n"),
    "penalty_alpha": Unserved((0,)),
    "repeat_last_n": Unserved((64,)),
    "repeat_penalty": Unserved((1,), "; use repetition_penalty"),
    "response_schema": _FORMAT,
    "sampling_params": Unserved(({},), "; its fields stand beside model here"),
    "tfs_z": Unserved((1,)),
    "think": _TEMPLATE,
    "top_a": Unserved((0,)),
    "top_n_tokens": Unserved((0,)),
    "xtc_probability": Unserved((0,)),
    # Fields that some of the four endpoints serve.
    **_none("allowed_token_ids", "conversation", "max_tool_calls", "prompt_logprobs", "seed"),
    "truncate_prompt_tokens": Unserved(),
    **dict.fromkeys(("bad_words", "include", "mcp_servers", "stop_token_ids"), Unserved(([],))),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "logprobs"), Unserved((False,))),
    **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "presence_penalty"), Unserved((0,))),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _FORM),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), Unserved((False,))),
    "add_generation_prompt": Unserved((True,)),
    "add_special_tokens": Unserved((False,), ": a chat's template has all the special tokens"),
    "background": Unserved((False,)),
    "best_of": Unserved((1,)),
    "container": Unserved(),
    "continue_final_message": Unserved((False,)),
    "include_reasoning": Unserved((True,)),
    "input": Unserved(use="; use messages"),
    "instructions": Unserved(("",), "; use a message of role system"),
    "logit_bias": Unserved(({},)),
    "n": Unserved((1,)),
    "output_config": Unserved(({},), "; use response_format and reasoning_effort"),
    "output_format": _FORMAT,
    "previous_response_id": Unserved(use=": it is for /v1/responses only"),
    "prompt": Unserved(use="; use messages"),
    "reasoning": Unserved(({},), "; use reasoning_effort"),
    "repetition_penalty": Unserved((1,)),
    "skip_special_tokens": Unserved((True,)),
    "stop": Unserved(([],), "; use stop_sequences"),
    "stop_sequences": Unserved(([],), "; use stop"),
    "system": Unserved(("", []), "; use a message of role system"),
    "text": Unserved(({},), "; use response_format"),
    "top_logprobs": Unserved((0,)),
    "truncation": Unserved(("auto", "disabled"), ": an input that does not fit is refused"),
}
_CHATS_ONLY = Unserved(use=": it is for chats only")
_COMPLETIONS = {
    **dict.fromkeys(("enable_thinking", "reasoning_effort", "think", "thinking"), _CHATS_ONLY),
    "chat_template_kwargs": _CHATS_ONLY._replace(neutral=({},)),
    "function_call": _CHATS_ONLY._replace(neutral=("none", "auto")),
    "functions": _CHATS_ONLY._replace(neutral=([],)),
    "input": Unserved(use="; use prompt"),
    "instructions": _CHATS_ONLY._replace(neutral=("",)),
    "messages": Unserved(use="; use prompt"),
    "parallel_tool_calls": _CHATS_ONLY._replace(neutral=(True, False)),
    "reasoning": _CHATS_ONLY._replace(neutral=({},)),
    "system": _CHATS_ONLY._replace(neutral=("", [])),
    "tool_choice": _CHATS_ONLY._replace(neutral=("none", "auto")),
    "tools": _CHATS_ONLY._replace(neutral=([],)),
    "top_logprobs": Unserved((0,), "; use logprobs"),
}
_EFFORT = Unserved(use="; use reasoning.effort")
_TEXT_FORMAT = Unserved(use="; use text.format")
_RESPONSES = {
    **dict.fromkeys((*_LIMITS, "max_tokens"), Unserved(use="; use max_output_tokens")),
    **dict.fromkeys(("enable_thinking", "reasoning_effort", "think", "thinking"), _EFFORT),
    **dict.fromkeys(("output_format", "response_format", "response_schema"), _TEXT_FORMAT),
    "chat_template_kwargs": _EFFORT._replace(neutral=({},)),
    "context_management": Unserved(([],)),
    "logprobs": Unserved((False,), "; use include and top_logprobs"),
    "messages": Unserved(use="; use input"),
    "n_probs": Unserved((0,), "; use include and top_logprobs"),
    "num_return_sequences": Unserved((1,)),
    "output_config": Unserved(({},), "; use text.format and reasoning.effort"),
    "prompt": Unserved(),
    "system": Unserved(("", []), "; use instructions"),
}
_THINKING = Unserved(use="; use thinking")
_OUTPUT_FORMAT = Unserved(use="; use output_config.format")
_MESSAGES = {
    **dict.fromkeys(("enable_thinking", "think"), _THINKING),
    **dict.fromkeys(("response_format", "response_schema"), _OUTPUT_FORMAT),
    **{name: _OUTPUT_FORMAT for name, each in GENERATING.items() if "structured_outputs" in each.use},
    **dict.fromkeys(("guided_json", "structured_outputs"), _OUTPUT_FORMAT),
    "chat_template_kwargs": _THINKING._replace(neutral=({},)),
    "instructions": Unserved(("",), "; use system"),
    "min_new_tokens": Unserved((0,)),
    "n_probs": Unserved((0,)),
    "num_return_sequences": Unserved((1,)),
    "parallel_tool_calls": Unserved((True,), "; use tool_choice.disable_parallel_tool_use"),
    "reasoning": _THINKING._replace(neutral=({},)),
    "reasoning_effort": Unserved(use="; use output_config.effort"),
    "repeat_penalty": Unserved((1,)),
    "text": _OUTPUT_FORMAT._replace(neutral=({},)),
    "typ_p": Unserved((1,), "; use top_p"),
    "typical": Unserved((1,), "; use top_p"),
    "typical_p": Unserved((1,), "; use top_p"),
}
_MESSAGE = {
    "audio": Unserved(),
    "function_call": Unserved(({},), "; use tool_calls"),
    "images": Unserved(([],)),
    **dict.fromkeys(("partial", "prefix"), Unserved((False,), "; use continue_final_message")),
}
_TEXT_ONLY = Unserved(use=": this model reads text only")
_MEDIA = dict.fromkeys(("audio_url", "file", "image_url", "input_audio", "video_url"), _TEXT_ONLY)
_MEDIA |= dict.fromkeys(("audio", "file_data", "file_id", "file_url", "image", "source"), _TEXT_ONLY)

GENERATES = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest")
CHANGES: Mapping[str, Mapping[str, Unserved]] = {  # by the name of a type
    "ChatRequest": {},
    "CompletionRequest": _COMPLETIONS,
    "ResponsesRequest": _RESPONSES,
    "MessagesRequest": _MESSAGES,
    "MessageParam": {"tool_calls": Unserved(use="; send a block of type tool_use")},
    "MessageBlock": {},
    "MessageTool": {"function": Unserved(use="; its fields stand beside type here")},
    "TokenizeRequest": {
        **{name: GENERATING[name] for name in ("chat_template", "documents", "enable_thinking", "think")},
        **{name: GENERATING[name] for name in ("input", "instructions", "system", "thinking")},
        "reasoning": Unserved(({},), "; use chat_template_kwargs"),
        "reasoning_effort": Unserved(use="; use chat_template_kwargs"),
        "truncate_prompt_tokens": Unserved(),
    },
    "DetokenizeRequest": {},
    "ChatMessage": _MESSAGE,
    "ContentPart": _MEDIA,
    "ToolCall": {"custom": Unserved()},
    "FunctionCall": {},
    "Tool": dict.fromkeys(
        ("custom", "description", "name", "parameters", "strict"), Unserved(use="; use function")
    ),
    "FunctionDefinition": {"returns": Unserved(use=": describe it in description")},
    "InputItem": _MEDIA
    | {"tool_calls": Unserved(use="; send an item of type function_call")}
    | dict.fromkeys(
        ("arguments", "content", "output", "role", "summary"), Unserved(use=" in an item of this type")
    ),
    "InputPart": _MEDIA,
    "ResponseTool": {"function": Unserved(use="; its fields stand beside type here")},
}
_ALL_HARMLESS = (
    *("cache_prompt", "client_metadata", "debug", "keep_alive", "media_io_kwargs", "metadata"),
    *("mm_processor_kwargs", "models", "parent_message_id", "prediction", "prompt_cache_options"),
    *("prompt_cache_retention", "provider", "request_id", "route", "safety_identifier", "service_tier"),
    *("session_id", "spaces_between_special_tokens", "store", "stream_interval", "timings_per_token"),
    *("moderation", "user", "usage"),
)
HARMLESS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Tool", "FunctionDefinition", "ResponseTool"), ("cache_control", "defer_loading")),
    **{name: _ALL_HARMLESS for name in CHANGES if name.endswith("Request")},
    "MessagesRequest": (
        *_ALL_HARMLESS,
        *(
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "cache_control",
            "context_management",
            "inference_geo",
        ),
        *("priority", "prompt_cache_key", "speed", "stream_options"),
    ),
    "MessageBlock": ("citations", "caller", "is_error", "title", "context"),
    "MessageTool": ("defer_loading", "eager_input_streaming", "allowed_callers", "input_examples"),
    "ChatMessage": ("cache_control", "finish_reason", "is_error", "timestamp", "usage", "metadata"),
    "ContentPart": ("cache_control", "prompt_cache_breakpoint"),
}
# What libraries keep beside an answer and send back with it. None is shown to a model.
_KEPT = ("annotations", "id", "parsed", "parsed_arguments", "provider_specific_fields", "status")
OURS: Mapping[str, tuple[str, ...]] = {
    "ChatMessage": (*_KEPT, "index", "type"),
    "ContentPart": (*_KEPT, "logprobs", "uuid", "signature", "data"),
    "ToolCall": (*_KEPT, "index", "cache_control", "extra_content"),
    "FunctionCall": (*_KEPT, "cache_control"),
}
# Tools that OpenAI's server runs itself, or whose calls are no JSON: the model is not shown them.
_HOSTED = re.compile(
    r"web_search(_preview)?(_\d+)*|file_search|code_interpreter|image_generation|mcp|namespace|tool_search|custom"
    r"|computer(_use_preview)?|local_shell|shell|apply_patch"
)
HOSTED = {
    "Tool": _HOSTED,
    "ResponseTool": _HOSTED,
    "MessageTool": re.compile(r"[a-z_]+_20\d{6}|mcp_toolset"),
}


@cache
def refusals(kind: str) -> Mapping[str, Unserved]:
    """Return the fields that would change the answer to requests of a type, by the type's name."""
    return {**(GENERATING if kind in GENERATES else {}), **CHANGES.get(kind, {})}


class FieldPlace(NamedTuple):
    """An object in a request: the name of its type, the fields that are served, and the objects in these.

    `wholes` are fields with whole numbers, which some clients write as 5.0. `by_type` are the places of an
    object that is one of several, by its field `type`.
    """

    name: str = ""
    served: frozenset[str] = frozenset()
    inner: Mapping[str, FieldPlace] = {}
    wholes: frozenset[str] = frozenset()
    by_type: Mapping[str, FieldPlace] = {}


def _free(name: str, served: str, **inner: FieldPlace) -> FieldPlace:
    """Make the place of an object that no type checks."""
    return FieldPlace(name, frozenset(served.split()), inner)


_PART = (
    "type text annotations id status parsed provider_specific_fields cache_control prompt_cache_breakpoint"
)
PARTS = FieldPlace(
    by_type={
        "input_text": _free("InputPart", _PART),
        "output_text": _free("InputPart", f"{_PART} logprobs"),
        "text": _free("InputPart", f"{_PART} logprobs"),
        "refusal": _free("InputPart", f"{_PART} refusal"),
        "reasoning_text": _free("InputPart", _PART),
        "summary_text": _free("InputPart", _PART),
    }
)
_ITEM = "type annotations id parsed parsed_arguments provider_specific_fields status cache_control created_by"
_CALL = f"{_ITEM} call_id name namespace caller"
ITEMS = {  # kinds of items in the input of /v1/responses
    "message": _free("InputItem", f"{_ITEM} role content phase", content=PARTS),
    "reasoning": _free(
        "InputItem", f"{_ITEM} content summary encrypted_content", content=PARTS, summary=PARTS
    ),
    "function_call": _free("InputItem", f"{_CALL} arguments"),
    "function_call_output": _free("InputItem", f"{_CALL} output", output=PARTS),
}
_BLOCK = "type cache_control signature"
_TEXT_BLOCK = _free("MessageBlock", f"{_BLOCK} text")
_TEXT_BLOCKS = {
    "text": _TEXT_BLOCK,
    "document": _free("MessageBlock", f"{_BLOCK} source title context"),
    "search_result": _free("MessageBlock", f"{_BLOCK} source title content", content=_TEXT_BLOCK),
}
_RESULT_BLOCK = FieldPlace(by_type=_TEXT_BLOCKS)
BLOCKS = FieldPlace(  # of the content of /v1/messages
    by_type={
        "thinking": _free("MessageBlock", f"{_BLOCK} thinking"),
        "redacted_thinking": _free("MessageBlock", f"{_BLOCK} data"),
        "tool_use": _free("MessageBlock", f"{_BLOCK} id name input"),
        "tool_result": _free("MessageBlock", f"{_BLOCK} tool_use_id content", content=_RESULT_BLOCK),
        **_TEXT_BLOCKS,
    }
)
_UNTYPED = {  # of a request that takes them as plain objects
    ("MessageParam", "content"): BLOCKS,
    ("MessagesRequest", "system"): _TEXT_BLOCK,
    ("MessagesRequest", "tools"): _free(
        "MessageTool", "type name description input_schema strict cache_control"
    ),
    ("ResponsesRequest", "input"): FieldPlace(by_type={**ITEMS, "": ITEMS["message"]}),
    ("ResponsesRequest", "tools"): _free("ResponseTool", "type name description parameters strict"),
}


@cache
def place_of(kind: Any) -> FieldPlace:
    """Return the place of the Struct in a type, which may be in a list or optional."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        inner = {name: _UNTYPED.get((kind.__name__, name)) or place_of(hint) for name, hint in hints.items()}
        wholes = {name for name, hint in hints.items() if int in _plain(hint) and float not in _plain(hint)}
        return FieldPlace(kind.__name__, frozenset(hints), inner, frozenset(wholes))
    return next((found for found in map(place_of, get_args(kind)) if found.served), FieldPlace())


def _plain(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def has_untyped(kind: type[msgspec.Struct]) -> bool:
    """Whether a request has objects that no type checks."""
    return any(name == kind.__name__ for name, _ in _UNTYPED)


def _is_like(name: str, known: Iterable[str]) -> bool:
    """Whether a name is a known one but for its spelling, as `topK` and `temprature` are."""
    name = name[:MAX_NAME_CHARS].lower()
    plain = name.replace("_", "").replace("-", "")
    return any(
        plain == each.replace("_", "") or SequenceMatcher(None, name, each).ratio() > LIKE for each in known
    )


class Fields:
    """Judge of a request's fields. `ignored` are the names of those that have no effect.

    Types of requests that are not in `CHANGES` take their own fields only.
    """

    def __init__(self, is_strict: bool = False) -> None:
        self.ignored: dict[str, None] = {}
        self._is_strict = is_strict

    def served(self, value: Any, place: FieldPlace, where: str = "") -> Any:
        """Copy a value without the fields that are not served. Raises RequestError for those that are
        refused."""
        if isinstance(value, list):
            return [
                self.served(each, place, f"{where}[{i}]")
                for i, each in enumerate(value)
                if not self._is_hosted(each, place, where)
            ]
        if not isinstance(value, dict):
            return value
        if place.by_type:
            kind = value.get("type") or ""
            found = place.by_type.get(kind) if isinstance(kind, str) else None
            return value if found is None else self.served(value, found, where)
        return dict(self._fields(value, place, where)) if place.served else value

    def _fields(self, value: dict[str, Any], place: FieldPlace, where: str) -> Iterator[tuple[str, Any]]:
        for name, each in value.items():
            path = f"{where}.{name[:MAX_NAME_CHARS]}".lstrip(".")
            if name in place.wholes and isinstance(each, float) and each.is_integer():
                yield name, int(each)
            elif name in place.served:
                yield name, self.served(each, place.inner.get(name, FieldPlace()), path)
            elif each is not None:
                self._judge(name, each, place, path)

    def _judge(self, name: str, value: Any, place: FieldPlace, path: str) -> None:
        if place.name not in CHANGES:
            near = "" if "." in path else meant(name, place.served)
            raise RequestError(f"unknown field {path}{near}", param=path, code="unknown_parameter")
        if name in OURS.get(place.name, ()):
            return
        refused = refusals(place.name)
        unserved = refused.get(name)
        if unserved is not None:
            if not unserved.is_neutral(value):
                raise RequestError(
                    f"{path} is not supported{unserved.use}", param=path, code="unsupported_parameter"
                )
            return
        if name not in HARMLESS.get(place.name, ()):
            if self._is_strict or _is_like(name, (*place.served, *refused)):
                near = meant(name, place.served)
                raise RequestError(f"unknown field {path}{near}", param=path, code="unknown_parameter")
        elif self._is_strict:
            reason = f"{path} has no effect, and this server is strict"
            raise RequestError(reason, param=path, code="unsupported_parameter")
        self.ignored[re.sub(r"\[\d+\]", "", path)] = None

    def _is_hosted(self, value: Any, place: FieldPlace, where: str) -> bool:
        """Whether an element of a list is a tool that is left out."""
        kind = value.get("type") if isinstance(value, dict) else None
        pattern = HOSTED.get(place.name)
        if self._is_strict or pattern is None or not isinstance(kind, str) or not pattern.fullmatch(kind):
            return False
        self.ignored[f"{where}.{kind}"] = None
        return True


IGNORED = web.RequestKey("IGNORED", Fields)


def ignored_header(fields: Fields) -> str:
    """Name the ignored fields of a request for a header, in ASCII."""
    names = [re.sub(r"[^!-+\--~]", "?", name) for name in fields.ignored]
    more = [f"and-{len(names) - MAX_NAMED}-more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more])
