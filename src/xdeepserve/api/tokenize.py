"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from xdeepserve.api.body import read_body
from xdeepserve.api.conversation import encode_chat
from xdeepserve.api.endpoint import ENDPOINT
from xdeepserve.api.offload import run_for_text
from xdeepserve.api.requests import DetokenizeRequest, TokenizeRequest
from xdeepserve.api.responses import DetokenizeResponse, TokenizeResponse, json_response
from xdeepserve.errors import RequestError


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: token ids of a prompt or a conversation."""
    endpoint = request.app[ENDPOINT]
    body = await read_body(request, TokenizeRequest)
    endpoint.check_model(body.model)
    tokenizer = endpoint.tokenizer
    if body.prompt is not None and body.messages is None:
        tokens = await run_for_text(tokenizer, len(body.prompt), tokenizer.encode, body.prompt)
    elif body.messages is not None and body.prompt is None:
        tokens = await encode_chat(
            tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
    else:
        raise RequestError("give either prompt or messages", param="prompt")
    token_strs = [tokenizer.id_to_token(token_id) or "" for token_id in tokens]
    return json_response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=endpoint.engine.max_model_len,
            tokens=tokens,
            token_strs=token_strs if body.return_token_strs else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids."""
    endpoint = request.app[ENDPOINT]
    body = await read_body(request, DetokenizeRequest)
    endpoint.check_model(body.model)
    for i, token_id in enumerate(body.tokens):
        if not 0 <= token_id < endpoint.engine.vocab_size:
            raise RequestError(
                f"tokens[{i}] is out of range: the vocabulary has ids 0 to {endpoint.engine.vocab_size - 1}, "
                f"found {token_id}",
                param="tokens",
            )
    # Special tokens stay, so that detokenize undoes tokenize.
    text = endpoint.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))
