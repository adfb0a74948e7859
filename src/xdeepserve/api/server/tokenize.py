"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from aiohttp import web

from xdeepserve.api.answers.offload import pieces, run_for_tokens
from xdeepserve.api.answers.responses import DetokenizeResponse, TokenizeResponse, encode_json, json_answer
from xdeepserve.api.openai.conversation import encode_chat
from xdeepserve.api.openai.requests import DetokenizeRequest, TokenizeRequest
from xdeepserve.api.openai.tools import check_shown
from xdeepserve.api.routes.body import judge_variables, read_body
from xdeepserve.api.server.endpoint import ApiEndpoint
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.errors import RequestError


async def tokenize(request: web.Request) -> web.Response:
    """Handle POST /tokenize: token ids of a prompt or a conversation."""
    body = await read_body(request, TokenizeRequest)
    endpoint = request.app[MODELS].find(body.model)
    tokenizer, with_names = endpoint.tokenizer, body.return_token_strs is True
    if body.prompt is not None and body.messages is None:
        for name in ("tools", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise RequestError(f"{name} goes with messages, not with a prompt", param=name)
        length, adds = len(body.prompt), body.add_special_tokens is True
        answer = await run_for_tokens(tokenizer, length, _of_text, endpoint, body.prompt, adds, with_names)
    elif body.messages is not None and body.prompt is None:
        if body.add_special_tokens:
            reason = "add_special_tokens is not for chats: their template has all the special tokens"
            raise RequestError(reason, param="add_special_tokens")
        if body.tools:
            check_shown(endpoint.engine.formats, endpoint.model_name)
        judge_variables(request, body.chat_template_kwargs, tokenizer.template_variables)
        tokens = await encode_chat(
            tokenizer,
            body.messages,
            body.add_generation_prompt,
            body.chat_template_kwargs,
            [tool.shown() for tool in body.tools or ()] or None,
            body.continue_final_message is True,
        )
        answer = await run_for_tokens(tokenizer, len(tokens), _tokenized, endpoint, tokens, with_names)
    else:
        raise RequestError("give either prompt or messages", param="prompt")
    return json_answer(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Handle POST /detokenize: the text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    endpoint = request.app[MODELS].find(body.model)
    tokenizer, tokens = endpoint.tokenizer, body.tokens
    return json_answer(await run_for_tokens(tokenizer, len(tokens), _detokenized, endpoint, tokens))


def _of_text(endpoint: ApiEndpoint, prompt: str, adds_special_tokens: bool, with_names: bool) -> bytes:
    return _tokenized(endpoint, endpoint.tokenizer.encode(prompt, adds_special_tokens), with_names)


def _tokenized(endpoint: ApiEndpoint, tokens: list[int], with_names: bool) -> bytes:
    """Encode the answer of /tokenize as JSON."""
    name_of, names = endpoint.tokenizer.id_to_token, None
    if with_names:
        names = [name_of(token_id) or "" for piece in pieces(tokens) for token_id in piece]
    return encode_json(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=endpoint.engine.max_model_len,
            tokens=tokens,
            token_strs=names,
        )
    )


def _detokenized(endpoint: ApiEndpoint, tokens: list[int]) -> bytes:
    """Encode the answer of /detokenize as JSON. Raises RequestError for an id that is not in the
    vocabulary."""
    vocab_size = endpoint.engine.vocab_size
    start = 0
    for piece in pieces(tokens):
        if min(piece) < 0 or max(piece) >= vocab_size:
            i, found = next((i, each) for i, each in enumerate(piece, start) if not 0 <= each < vocab_size)
            raise RequestError(
                f"tokens[{i}] is out of range: the vocabulary has ids 0 to {vocab_size - 1}, found {found}",
                param="tokens",
            )
        start += len(piece)
    # Special tokens stay, so that detokenize undoes tokenize.
    return encode_json(
        DetokenizeResponse(prompt=endpoint.tokenizer.decode(tokens, skip_special_tokens=False))
    )
