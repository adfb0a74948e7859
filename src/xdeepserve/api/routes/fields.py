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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import web

from xdeepserve.errors import RequestError
from xdeepserve.model import message_fields
from xdeepserve.model.message_fields import (
    ARGUMENTS,
    CONTENTS,
    MAX_NAME_CHARS,
    MEDIA,
    OURS,
    SCHEMAS,
    TEXT_ONLY,
    RefusedFields,
    Unserved,
    rows,
    unknown_field,
)

MAX_IGNORED = 1000  # names of fields that one request may have ignored
MAX_NAMED = 32  # fields in a header

_NOTHING: tuple[Any, ...] = (False, 0, "", [], {})  # values that ask for nothing of most fields


# What to use instead, in a chat's words; `_WORDS` has those of the other endpoints.
_APART = ": the reasoning is always apart from the content; leave it out"
_CHATS_ONLY = ": it is for chats only"
_EFFORT = "; use reasoning_effort"
_FORM = "; use structured_outputs"
_FORMAT = "; use response_format"
_LIMIT = "; use max_tokens"
_MESSAGES = "; use messages"
_PREFIX = "; use continue_final_message"
_SYSTEM = "; use a message of role system"
_VARIABLES = "chat_template_kwargs"
_TEMPLATE = f"; what the chat template knows goes into {_VARIABLES}"
# Of every endpoint that generates, unless it serves the field or has words of its own for it in `CHANGES`:
# fields that some of the four endpoints serve, and those of OpenAI, vLLM, SGLang, llama.cpp, Ollama, TGI,
# TensorRT-LLM, transformers, Mistral, Cohere, Gemini, xAI, OpenRouter and others that show another prompt,
# draw other tokens, end elsewhere or give another answer. Other spellings of a name (topK) count as it does.
GENERATING: Mapping[str, Unserved] = {
    # The prompt.
    **rows(
        """chat_history contents conversation_history history input input_ids input_text
        inputs message messages prompt prompt_token_ids query question text_input tool_outputs tool_results
        user_prompt""",
        _MESSAGES,
        "",
        [],
    ),
    **rows(
        """additional_instructions instructions preamble pre_prompt system system_instruction system_message
        system_prompt""",
        _SYSTEM,
        "",
        [],
    ),
    **rows(
        """attachments audio_data file_ids files image image_data image_url image_urls images multi_modal_data
        multimodal_data video_data videos""",
        TEXT_ONLY,
        *_NOTHING,
    ),
    **rows("chat_template_kwargs enable_thinking prompt_mode think thinking thinking_config", _TEMPLATE, {}),
    **rows("chat_template prompt_embeds"),
    **rows("cached_content character context instruction_template", "", "", []),
    **rows("lora_path preset template tool_prompt", "", ""),
    **rows("conversation suffix negative_prompt", "", ""),
    **rows("input_extra input_prefix input_suffix", "; write it into the prompt", "", []),
    **rows("connectors data_sources documents guardrails", "", [], {}),
    **rows("search_domain_filter search_queries_only enable_search web_search", "", False, []),
    **rows("search_options search_parameters web_search_options"),  # an empty object switches the search on
    "add_generation_prompt": Unserved((True,)),
    "add_special_tokens": Unserved((False,), ": a chat's template has all the special tokens"),
    "chat_template_content_format": Unserved(("auto", "string")),
    "continue_final_message": Unserved((False,)),
    **rows(
        "answer_prefix assistant_prefill assistant_prefix prefill response_prefill response_prefix",
        _PREFIX,
        "",
    ),
    "previous_response_id": Unserved(use=": it is for /v1/responses only"),
    "safe_prompt": Unserved((False,)),
    "truncation": Unserved(("auto", "disabled"), ": an input that does not fit is refused"),
    "prompt_truncation": Unserved(("OFF",), ": an input that does not fit is refused"),
    "truncate_prompt_tokens": Unserved(),
    **rows("max_input_tokens prompt_truncate_len truncate", "; use truncate_prompt_tokens", 0),
    "truncation_side": Unserved(("left",), ": a prompt's last tokens are kept"),
    # Tools.
    **rows("function_declarations functions", "; use tools", []),
    "function_call": Unserved(("none", "auto"), "; use tool_choice"),
    "tool_config": Unserved(({},), "; use tool_choice"),
    **rows("max_tool_calls container"),
    **rows("include mcp_servers", "", []),
    # The length of the answer, and where it ends.
    **rows(
        """max_completion_tokens max_gen_len max_gen_toks max_length max_new_tokens max_output_tokens
        max_tokens_to_generate max_tokens_to_sample n_predict num_predict output_len request_output_len
        max_answer_tokens max_completion_length max_generated_tokens max_out_len max_response_tokens
        tokens_to_generate""",
        _LIMIT,
    ),
    **rows(
        """budget_tokens max_reasoning_tokens max_thinking_tokens reasoning_budget reasoning_tokens
        thinking_budget thinking_budget_tokens thinking_token_budget""",
        ": no limit is for the reasoning alone",
        -1,
    ),
    **rows("min_length min_new_tokens min_output_tokens", "; use min_tokens", 0),
    **rows("stop stop_sequence stop_sequences stop_str stop_strings", "; use stop", "", []),
    **rows("end_sequences stop_words stopping_strings stops until", "; use stop", "", []),
    "stop_regex": Unserved(("", [])),
    **rows("end_id eos_token_id eos_token_ids stop_ids terminators", "; use stop_token_ids", []),
    "ban_eos_token": Unserved((False,), "; use ignore_eos"),
    "no_stop_trim": Unserved((False,), "; use include_stop_str_in_output"),
    **rows("max_time n_indent t_max_predict_ms", "", 0),
    # The form of the answer.
    **rows("choice ebnf format grammar guided_choice guided_decoding guided_grammar guided_json", _FORM, ""),
    **rows("guided_json_object guided_regex json json_schema regex schema", _FORM, "", False),
    **rows("json_mode json_object", _FORMAT, False),
    **rows(
        """output_format output_schema output_type response_format response_json_schema response_model
        response_schema structured_output text""",
        _FORMAT,
        {},
    ),
    "response_mime_type": Unserved(("text/plain",), _FORMAT),
    "structured_outputs": Unserved(({},), _FORM),
    **rows("guided_whitespace_pattern structural_tag"),
    "modalities": Unserved((["text"],)),
    "response_modalities": Unserved((["text"], ["TEXT"])),
    "verbosity": Unserved(("medium",)),
    "output_config": Unserved(({},), "; use response_format and reasoning_effort"),
    # Which tokens are drawn.
    **rows("manual_seed random_seed rng_seed sampling_seed seed", "; use seed", -1),
    "k": Unserved((0,), "; use top_k"),
    "p": Unserved(use="; use top_p"),
    "temp": Unserved(use="; use temperature"),
    **rows("typ_p typical typical_p", "; use top_p or min_p", 1),
    **rows("rep_pen repeat_penalty", "; use repetition_penalty", 1),
    "repetition_penalty": Unserved((1,)),
    **rows("frequency_penalty min_p min_tokens presence_penalty", "", 0),
    **rows("dry_multiplier dynatemp_range mirostat mirostat_mode no_repeat_ngram_size penalty_alpha", "", 0),
    **rows("encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_keep smoothing_factor", "", 0),
    **rows("diversity_penalty top_a top_n_tokens xtc_probability", "", 0),
    **rows(
        "beam_size beam_width cfg_scale encoder_repetition_penalty guidance_scale num_beam_groups num_beams",
        "",
        1,
    ),
    **rows("best_of dynatemp_exponent len_penalty length_penalty tfs tfs_z", "", 1),
    **rows("dynamic_temperature early_stopping penalize_nl", "", False),
    **rows("temperature_last use_beam_search watermark", "", False),
    **rows("adapter_id custom_logit_processor logit_bias_exp logits_processor_pattern repetition_detection"),
    **rows("forced_bos_token_id forced_eos_token_id"),
    **rows("begin_suppress_tokens bad_words_ids force_words_ids suppress_tokens", "", []),
    **rows("bad_words logits_processors lora plugins", "", []),
    **rows("samplers sampler_order stop_token_ids transforms", "", []),
    **rows("banned_strings banned_tokens custom_token_bans", "; use bad_words", "", []),
    **rows("kv_transfer_params ec_transfer_params logit_bias", "", {}),
    **rows("sequence_bias session_params vllm_xargs", "", {}),
    **rows("allowed_token_ids cache_salt exponential_decay_length_penalty"),
    "do_sample": Unserved((True,), "; temperature 0 draws the likeliest token"),
    "id_slot": Unserved((-1,)),
    "repeat_last_n": Unserved((64,)),
    "top_n_sigma": Unserved((-1, 0)),
    **rows(
        """additional_model_request_fields custom_params extra_body extra_params gen_kwargs
        generation_config generation_kwargs inference_config model_kwargs options parameters
        sampling_parameters sampling_params""",
        "; its fields stand beside model here",
        {},
    ),
    # What the answer shows.
    **rows("candidate_count n_cmpl num_completions num_return_sequences", "; use n", 1),
    "n": Unserved((1,)),
    "logprobs": Unserved((False,)),
    "top_logprobs": Unserved((0,)),
    **rows("n_probs top_logprobs_num", "; use logprobs", 0),
    **rows("response_logprobs return_log_probs return_logprob", "; use logprobs", False),
    **rows("logprob_token_ids prompt_logprobs token_ids_logprob"),
    **rows("return_prompt_token_ids return_tokens", "; use return_token_ids", False),
    **rows("background decoder_input_details deferred details echo ignore_eos", "", False),
    **rows("include_stop_str_in_output post_sampling_probs raw return_full_text", "", False),
    **rows("return_hidden_states return_images return_routed_experts return_token_ids", "", False),
    **rows("return_tokens_as_token_ids thinking_forced_open", "", False),
    **rows("detokenize include_reasoning parse_tool_calls", "", True),
    **rows("skip_special_tokens stream_reasoning", "", True),
    "audio": Unserved(),
    "reasoning": Unserved(({},), _EFFORT),
    "reasoning_effort": Unserved(use=_EFFORT),
    "reasoning_format": Unserved(("auto", "deepseek", "parsed"), _APART),
    "separate_reasoning": Unserved((True,), _APART),
    "response_fields": Unserved(([],)),
}
_NOT_IN_MESSAGES = """bad_words ignore_eos include_stop_str_in_output logprobs min_tokens n repetition_penalty
    return_token_ids seed stop_token_ids truncate_prompt_tokens"""
_WORDS: Mapping[str, Mapping[str, str]] = {  # by endpoint: what to use there
    "CompletionRequest": {
        **dict.fromkeys(
            ("; use tools", "; use tool_choice", _EFFORT, _SYSTEM, _TEMPLATE, _APART), _CHATS_ONLY
        ),
        _MESSAGES: "; use prompt",
        _PREFIX: "; write it at the end of prompt",
        "; use response_format and reasoning_effort": _FORMAT,
    },
    "ResponsesRequest": {
        **dict.fromkeys((_EFFORT, _TEMPLATE), "; use reasoning.effort"),
        **dict.fromkeys(("; use n", "; use return_token_ids"), ""),
        _FORMAT: "; use text.format",
        _LIMIT: "; use max_output_tokens",
        _MESSAGES: "; use input",
        _PREFIX: "",
        _SYSTEM: "; use instructions",
        "; use logprobs": "; use include and top_logprobs",
        "; use response_format and reasoning_effort": "; use text.format and reasoning.effort",
    },
    "MessagesRequest": {
        **{f"; use {name}": "" for name in _NOT_IN_MESSAGES.split()},
        **dict.fromkeys((_FORM, _FORMAT), "; use output_config.format"),
        _EFFORT: "; use output_config.effort",
        _PREFIX: "; use a last message of role assistant",
        _SYSTEM: "; use system",
        _TEMPLATE: "; use thinking",
        "; use stop": "; use stop_sequences",
        "; use top_p or min_p": "; use top_p",
    },
}
_COMPLETIONS = {
    **rows("enable_thinking think", _CHATS_ONLY, False),
    "parallel_tool_calls": Unserved((True, False), _CHATS_ONLY),
    "reasoning_effort": Unserved(("none",), _CHATS_ONLY),
    "thinking": Unserved(({"type": "disabled"}, False), _CHATS_ONLY),
    "tool_choice": Unserved(("none", "auto"), _CHATS_ONLY),
    "tools": Unserved(([],), _CHATS_ONLY),
    "top_logprobs": Unserved((0,), "; use logprobs"),
}
_RESPONSES = {
    "conversation": Unserved(("",), "; use previous_response_id"),
    "logprobs": Unserved((False,), "; use include and top_logprobs"),
    "max_tokens": Unserved(use="; use max_output_tokens"),
}
_PARALLEL = Unserved((True,), "; use tool_choice.disable_parallel_tool_use")
GENERATES = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest")
CHANGES: Mapping[str, Mapping[str, Unserved]] = {  # by the name of a type
    "ChatRequest": {},
    "CompletionRequest": _COMPLETIONS,
    "ResponsesRequest": _RESPONSES,
    "MessagesRequest": {"parallel_tool_calls": _PARALLEL},
    "MessageParam": {"tool_calls": Unserved(use="; send a block of type tool_use")},
    "MessageBlock": rows(ARGUMENTS, "; use input") | rows(CONTENTS, "; use content", "", []),
    "MessageTool": {
        **rows(SCHEMAS, "; use input_schema"),
        "function": Unserved(use="; its fields stand beside type here"),
    },
    "TokenizeRequest": {
        **{
            name: each
            for name, each in GENERATING.items()
            if each.use in (_MESSAGES, _SYSTEM, _TEMPLATE, TEXT_ONLY, "; use tools")
        },
        **{name: GENERATING[name] for name in ("chat_template", "documents", "truncate_prompt_tokens")},
        **rows("reasoning reasoning_effort", "; use chat_template_kwargs", {}),
    },
    "DetokenizeRequest": {},
    **message_fields.CHANGES,
    "InputItem": MEDIA
    | rows("args input parameters params", "; use arguments")
    | {
        "tool_calls": Unserved(use="; send an item of type function_call"),
        "tool_call_id": Unserved(use="; use an item of type function_call_output"),
    }
    | dict.fromkeys(
        ("arguments", "content", "output", "role", "summary"), Unserved(use=" in an item of this type")
    ),
    "InputPart": MEDIA,
    "ResponseTool": {
        **rows(SCHEMAS, "; use parameters"),
        "function": Unserved(use="; its fields stand beside type here"),
    },
}
_ALL_HARMLESS = (
    *("cache_prompt", "client_metadata", "debug", "keep_alive", "media_io_kwargs", "metadata"),
    *("mm_processor_kwargs", "models", "parent_message_id", "prediction", "prompt_cache_options"),
    *("prompt_cache_retention", "provider", "request_id", "route", "safety_identifier", "service_tier"),
    *("session_id", "spaces_between_special_tokens", "store", "stream_interval", "timings_per_token"),
    *("moderation", "user", "usage"),
)
HARMLESS: Mapping[str, tuple[str, ...]] = {
    **message_fields.HARMLESS,
    "ResponseTool": ("cache_control", "defer_loading"),
    **{name: _ALL_HARMLESS for name in CHANGES if name.endswith("Request")},
    # Edits of a history that do nothing below their thresholds: an input that does not fit is refused.
    "ResponsesRequest": (*_ALL_HARMLESS, "context_management"),
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
    "ThinkingChoice": ("budget_tokens",),
    "MessageBlock": ("citations", "caller", "is_error", "title", "context"),
    "MessageTool": (
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "allowed_callers",
        "input_examples",
    ),
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
    words = _WORDS.get(kind, {})
    shared = GENERATING.items() if kind in GENERATES else ()
    own = {name: each._replace(use=words.get(each.use, each.use)) for name, each in shared}
    return {**own, **CHANGES.get(kind, {})}


@cache
def _refusals(kind: str) -> RefusedFields:
    return RefusedFields(refusals(kind))


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
_SOURCE = _free("DocumentSource", "type media_type data content url")
_TEXT_BLOCK = _free("MessageBlock", f"{_BLOCK} text")
_TEXT_BLOCKS = {
    "text": _TEXT_BLOCK,
    "document": _free("MessageBlock", f"{_BLOCK} source title context", source=_SOURCE),
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
        if name in OURS.get(place.name, ()):
            return
        if name not in HARMLESS.get(place.name, ()):
            if _refusals(place.name).asks_for_nothing(path, name, value, place.served):
                return
            if self._is_strict or place.name not in CHANGES:
                raise unknown_field(path, name, place.served)
        elif self._is_strict:
            reason = f"{path} has no effect, and this server is strict"
            raise RequestError(reason, param=path, code="unsupported_parameter")
        self._ignore(path)

    def judge_variables(self, given: Mapping[str, Any], known: frozenset[str]) -> None:
        """Judge variables for a chat template, which reads the `known` ones. Raises RequestError for those
        that are like a known one, and in a strict server for all that the template does not read."""
        for name, value in given.items():
            path = f"{_VARIABLES}.{name[:MAX_NAME_CHARS]}"
            if name not in known and value is not None:
                RefusedFields({}).asks_for_nothing(path, name, value, known)
                if self._is_strict:
                    raise unknown_field(path, name, known)
                self._ignore(path)

    def _ignore(self, path: str) -> None:
        self.ignored[re.sub(r"\[\d+\]", "", path)] = None
        if len(self.ignored) > MAX_IGNORED:
            raise RequestError(f"the request has more than {MAX_IGNORED} unknown fields", param=path)

    def _is_hosted(self, value: Any, place: FieldPlace, where: str) -> bool:
        """Whether an element of a list is a tool that is left out."""
        kind = value.get("type") if isinstance(value, dict) else None
        pattern = HOSTED.get(place.name)
        if self._is_strict or pattern is None or not isinstance(kind, str) or not pattern.fullmatch(kind):
            return False
        self.ignored[f"{where}.{kind}"] = None
        return True


IGNORED = web.RequestKey("IGNORED", Fields)


def note_ignored(request: web.Request, names: Sequence[str]) -> None:
    """Name fields in the answer's `x-ignored-fields`."""
    if names:
        fields = request[IGNORED] = request.get(IGNORED) or Fields()
        fields.ignored.update(dict.fromkeys(names))


def ignored_header(fields: Fields) -> str:
    """Name the ignored fields of a request for a header, in ASCII."""
    names = [re.sub(r"[^!-+\--~]", "?", name) for name in fields.ignored]
    more = [f"and-{len(names) - MAX_NAMED}-more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more])
