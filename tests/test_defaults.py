"""What a request has that gives nothing but its prompt: the table in SamplingParams' docstring is true."""

import re

import pytest

from xdeepserve import SamplingParams
from xdeepserve.api.openai.completions import DEFAULT_MAX_TOKENS
from xdeepserve.api.openai.requests import ChatRequest, CompletionRequest
from xdeepserve.api.server.endpoint import requested_max_tokens, sampling_params
from xdeepserve.cli import build_parser

DOORS = ["SamplingParams", "xdeepserve generate", "/v1/completions", "/v1/chat/completions"]


def table() -> dict[str, dict[str, str]]:
    """The docstring's values by door and parameter."""
    lines = (SamplingParams.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if "not given" in line)
    rows = [re.split(r" {2,}", line.strip()) for line in lines[start : lines.index("", start)]]
    assert rows[0] == ["not given", *DOORS]
    return {door: {row[0]: row[column] for row in rows[1:]} for column, door in enumerate(DOORS, start=1)}


def found(door: str) -> object:
    """What each door makes of a request without parameters."""
    if door == "SamplingParams":
        return SamplingParams()
    if door == "xdeepserve generate":
        return build_parser().parse_args(["generate", "--prompt", "x"])
    body: CompletionRequest | ChatRequest
    if door == "/v1/completions":
        body, default = CompletionRequest(prompt="x"), DEFAULT_MAX_TOKENS
    else:
        body, default = ChatRequest(messages=[]), None
    asked = requested_max_tokens(body)
    return sampling_params(body, defaults={}, max_tokens=default if asked is None else asked, logprobs=None)


@pytest.mark.parametrize("door", DOORS)
def test_the_table_of_defaults_is_true(door: str) -> None:
    documented, values = table()[door], found(door)
    assert {"max_tokens", "temperature", "top_p", "top_k", "seed"} <= documented.keys()
    assert documented == {name: str(getattr(values, name)) for name in documented}


def test_every_option_that_samples_is_in_the_table() -> None:
    options = vars(build_parser().parse_args(["generate", "--prompt", "x"]))
    shared = options.keys() & {*SamplingParams.__struct_fields__}
    assert shared - {"ignore_eos"} == table()["SamplingParams"].keys()
    assert options["ignore_eos"] is SamplingParams().ignore_eos is False


def test_the_difference_is_said_where_one_meets_it() -> None:
    from xdeepserve import LLM

    assert "`xdeepserve generate` is greedy (temperature 0)" in (LLM.generate.__doc__ or "")
    parser = build_parser().parse_args(["generate", "--prompt", "x"]).parser
    assert "default 0, greedy (LLM, endpoint: 1)" in " ".join(parser.format_help().split())
