"""The facade: outputs, logits, errors, and that nothing is left behind."""

import asyncio
import copy
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.model.hf_fixtures import Fixture, fixtures
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.errors import DeploymentError, InputError, LostDieError, RequestError, XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import CompletionOutput, RequestOutput, digest
from xdeepserve.llm.request_outputs import unfinished
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.config import load_config
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.step.linear import POOL, Threads

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SECONDS = 60.0  # in which a thread must have ended; it takes a fraction of one on a machine at rest


@pytest.fixture(scope="module")
def llm(tiny: TinyCheckpoint):
    with LLM(tiny, "colocated", overrides=["dies=3", "scheduler.max_num_seqs=4"]) as made:
        yield made
        made.engine.check_integrity()
        assert made.engine.stats().kv_cache_usage == 0.0
        assert made.engine.stats().num_running == made.engine.stats().num_waiting == 0


# That dies side by side say what one die says is shown with one fixture here; tests/test_families.py has all
# families, and the campaign all fixtures.
SIDE_BY_SIDE = [
    pytest.param("colocated", fixture, marks=pytest.mark.campaign if number else ())
    for number, fixture in enumerate(fixtures())
]


@pytest.mark.parametrize(
    ("deployment", "fixture"),
    [*(("monolithic", fixture) for fixture in fixtures()), *SIDE_BY_SIDE],
    ids=lambda value: getattr(value, "name", value),
)
def test_greedy_tokens_and_logits_of_transformers(deployment: str, fixture: Fixture, tmp_path) -> None:
    checkpoint = open_checkpoint(fixture.checkpoint_dir(tmp_path))
    with LLM(checkpoint, deployment, "fp32") as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(fixture.prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == fixture.tokens
        for prompt, expected in zip(fixture.prompts, fixture.logits, strict=True):
            logits = llm.logits(prompt)
            assert logits.shape == (len(prompt), fixture.config["vocab_size"])
            assert np.abs(logits[-1] - expected).max() < 2e-3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take the pages back when they like")
def test_who_closes_gives_memory_back_at_once() -> None:
    """Whoever still holds the pod, or a view of a die's memory, keeps no pages of it."""
    with LLM("tiny-random") as llm:
        seen = np.frombuffer(llm.engine.je.tes[0].executors[0].die.memory.buffer, np.uint8)
        assert seen.any()
    assert not seen.any()


def test_logits_are_the_reference_bits(llm: LLM, tiny: TinyCheckpoint) -> None:
    ids = [(7 * i) % 300 for i in range(150)]  # longer than a step
    assert np.array_equal(llm.logits(ids), Reference(tiny, "int8").logits(ids))


def test_mtp_offers_and_accepts_drafts_and_changes_nothing(tiny: TinyCheckpoint) -> None:
    prompts = [[5, 6, 7], list(range(40)), [200]]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    sequences = []
    with LLM(tiny, "colocated", overrides=["dies=2"]) as plain:
        expected = digest(plain.generate(prompts, params, keep_logits=True))
        plain_steps = plain.engine.je.tes[0].step_idx
    with LLM(tiny, "colocated", overrides=["dies=2", "mtp=1"]) as mtp:
        submit = mtp.engine.submit

        def remember(*args, **kwargs):
            request = submit(*args, **kwargs)
            sequences.extend(request.sequences)
            return request

        mtp.engine.submit = remember  # type: ignore[method-assign]
        assert digest(mtp.generate(prompts, params, keep_logits=True)) == expected
        assert mtp.engine.je.tes[0].step_idx < plain_steps
    num_drafts = sum(sum(seq.num_drafts) for seq in sequences)
    assert num_drafts > 20
    assert 0 < sum(sum(seq.num_accepted) for seq in sequences) < num_drafts


def test_preemption_happens_and_changes_nothing(tiny: TinyCheckpoint) -> None:
    prompts = [list(range(i, i + 60)) for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = digest(one_die(prompts, params))
    with LLM(tiny, "monolithic", overrides=["max_model_len=256", "cache.num_blocks=16"]) as tight:
        assert digest(tight.generate(prompts, params, keep_logits=True)) == expected
        assert tight.engine.stats().num_preemptions > 0
        tight.engine.check_integrity()


def test_swapping_happens_and_changes_nothing(tiny: TinyCheckpoint) -> None:
    prompts = [list(range(i, i + 60)) for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = digest(one_die(prompts, params))
    overrides = ["max_model_len=256", "cache.num_blocks=16", "cache.num_host_blocks=64"]
    with LLM(tiny, "monolithic", overrides=[*overrides, "cache.preemption=swap"], trace=True) as swapping:
        assert digest(swapping.generate(prompts, params, keep_logits=True)) == expected
        assert swapping.engine.stats().num_preemptions > 0
        names = [span.name for span in swapping.engine.plan.pod.trace.spans if span.lane == "DMA"]
        assert names.count("KV blocks") >= 2 * swapping.engine.stats().num_preemptions
        swapping.engine.check_integrity()


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_a_cached_prefix_is_found_again_and_changes_nothing(tiny: TinyCheckpoint, host_blocks: int) -> None:
    prompt = list(range(100))
    overrides = ["max_model_len=256", "cache.num_blocks=16", f"cache.num_host_blocks={host_blocks}"]
    with LLM(tiny, "monolithic", overrides=[*overrides, "cache.load=always"]) as llm:
        first = llm.generate(prompt, GREEDY, keep_logits=True)
        if host_blocks:  # let the prefix leave HBM
            long = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
            llm.generate([[200, *range(99)]], long)
            group = llm.engine.groups[0]
            assert not group.rtc.match_by_prefix_token(prompt).ready
            assert group.rtc.match_by_prefix_token(prompt).saved
        before = llm.engine.stats().prefix_cache_hits
        again = llm.generate(prompt, GREEDY, keep_logits=True)
        assert llm.engine.stats().prefix_cache_hits - before == 96
        assert digest(again) == digest(first)
        llm.engine.check_integrity()


@pytest.mark.parametrize(("count", "is_even"), [(2, True), (3, False)])
def test_threads_are_used_and_change_nothing(
    tiny: TinyCheckpoint, monkeypatch, count: int, is_even: bool
) -> None:
    """Three have no even shares of an expert's columns: each takes every third tile of all experts."""
    monkeypatch.setattr("xdeepserve.step.linear.PARALLEL_OPS", 1000)
    monkeypatch.setattr("xdeepserve.step.linear.uses_amx", lambda: False)  # which shares columns always
    prompts = [list(range(100)), [3]]
    with LLM(tiny, "monolithic", overrides=["threads=1"]) as one:
        expected = digest(one.generate(prompts, GREEDY, keep_logits=True))
    with LLM(tiny, "monolithic", overrides=[f"threads={count}"]) as some:
        assert digest(some.generate(prompts, GREEDY, keep_logits=True)) == expected
        names = [thread.name for thread in threading.enumerate()]
        assert any(name.startswith(POOL) for name in names), "no other thread ever ran"
    threads = Threads(count)
    assert threads.can_share_columns(tiny.config.hidden_size) == is_even
    threads.close()


def test_sampling_depends_on_seed_and_choice_only(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3, ignore_eos=True)
    alone = llm.generate([[9, 8, 7]], params)[0]
    among = llm.generate([[1], [9, 8, 7], [2, 2]], params)[1]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in among.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 3
    other = llm.generate([[9, 8, 7]], SamplingParams(max_tokens=12, temperature=1.0, seed=6, ignore_eos=True))
    assert other[0].outputs[0].token_ids != alone.outputs[0].token_ids


def test_unseeded_requests_differ_but_runs_repeat(tiny: TinyCheckpoint) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.5, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(tiny) as llm:
            runs.append([llm.generate([[4]], params)[0].outputs[0].token_ids for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_are_the_log_softmax_of_the_logits(llm: LLM) -> None:
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    choice = output.outputs[0]
    logits = llm.logits(prompt + choice.token_ids).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert choice.logprobs is not None
    for i, position in enumerate(choice.logprobs):
        row = exact[len(prompt) - 1 + i]
        assert position[choice.token_ids[i]].rank == 1
        assert list(position) == np.argsort(-row, kind="stable")[:3].tolist()
        np.testing.assert_allclose([p.logprob for p in position.values()], np.sort(row)[::-1][:3], atol=1e-5)
        assert position[choice.token_ids[i]].decoded_token == llm.tokenizer.token_text(choice.token_ids[i])
    chosen = [position[t].logprob for position, t in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, position in enumerate(output.prompt_logprobs[1:]):
        assert position is not None
        score = position[prompt[i + 1]]
        np.testing.assert_allclose(score.logprob, exact[i][prompt[i + 1]], atol=1e-5)
        assert score.rank == 1 + int((exact[i] > exact[i][prompt[i + 1]]).sum())
        assert len(position) in (2, 3)


def test_prompt_scores_survive_preemption(tiny: TinyCheckpoint) -> None:
    prompts = [[(i * 37 + j) % 300 for j in range(100)] for i in range(6)]
    params = SamplingParams(
        max_tokens=30, temperature=0.0, prompt_logprobs=1, logprobs=1, ignore_eos=True, n=2
    )
    with LLM(tiny) as roomy:
        expected = roomy.generate(prompts, params)
    tight = ["max_model_len=144", "cache.num_blocks=16", "scheduler.max_num_batched_tokens=64"]
    with LLM(tiny, overrides=tight) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.engine.stats().num_preemptions > 0
    for got, wanted in zip(outputs, expected, strict=True):
        assert len(got.prompt_logprobs or []) == 100
        assert got.prompt_logprobs == wanted.prompt_logprobs
        assert got.outputs == wanted.outputs


def test_logits_of_a_text_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logits takes token ids, found a text"):
        llm.logits("hi")


def test_logits_of_a_full_context(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, overrides=["max_model_len=40"]) as llm:
        assert llm.logits(list(range(40))).shape == (40, 320)
        with pytest.raises(RequestError, match="context"):
            llm.logits(list(range(41)))


def test_a_dense_model_with_an_mtp_layer_of_experts(tmp_path) -> None:
    fixture = next(f for f in fixtures() if f.mtp_logits)
    directory = fixture.checkpoint_dir(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config |= {"first_k_dense_replace": config["num_hidden_layers"]}
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config))
    seeded = SeededCheckpoint("dense", dense, load_config(dense), 5)
    digests = set()
    for deployment in ("monolithic", "colocated"):
        for mtp in (0, 1):
            with LLM(seeded, deployment, overrides=[f"mtp={mtp}"]) as llm:
                digests.add(digest(llm.generate([[1, 2, 3]], GREEDY, keep_logits=True)))
    assert len(digests) == 1


def test_prompt_forms(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("Hi")
    as_text, as_ids = llm.generate("Hi", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert as_text.outputs[0] == as_ids.outputs[0]
    assert (as_text.prompt, as_ids.prompt) == ("Hi", None)
    assert as_text.outputs[0].text == llm.tokenizer.decode(as_text.outputs[0].token_ids)
    chat = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert chat.prompt_token_ids[0] == llm.tokenizer.bos_token_id


def test_a_chat_takes_messages_in_the_forms_of_the_api(llm: LLM) -> None:
    def ids(*messages: dict[str, object]) -> list[int]:
        return llm.chat([*messages, {"role": "user", "content": "Hi"}], GREEDY).prompt_token_ids

    for content in ({}, {"content": None}, {"content": []}):
        assert ids({"role": "assistant", **content}) == ids({"role": "assistant", "content": ""})
    assert ids({"role": "assistant", "content": None, "refusal": "No."}) == ids(
        {"role": "assistant", "content": "No."}
    )
    assert ids({"role": "developer", "content": "Be kind."}) == ids({"role": "system", "content": "Be kind."})
    for parts in (
        [{"type": "refusal", "refusal": "No."}],
        [{"type": "thinking", "thinking": "Hm."}, {"type": "output_text", "text": "No."}],
        [{"type": "reasoning", "text": "Hm."}, "No."],
    ):
        assert ids({"role": "assistant", "content": parts}) == ids({"role": "assistant", "content": "No."})


def test_several_threads_may_generate(llm: LLM) -> None:
    """Each gets the tokens of its own prompt, also within a running event loop, as in a notebook."""
    prompts = [[number, 5, 9, 7 * number] for number in range(1, 13)]

    def tokens(prompt: list[int]) -> list[int]:
        return llm.generate([prompt], SamplingParams(max_tokens=8, seed=3))[0].outputs[0].token_ids

    alone = [tokens(prompt) for prompt in prompts]

    async def together() -> list[list[int]]:
        assert tokens(prompts[0]) == alone[0]
        return await asyncio.gather(*(asyncio.to_thread(tokens, prompt) for prompt in prompts))

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize("deployment", ["monolithic", "pd", "eaas"])
def test_closing_an_llm_ends_what_another_thread_generates(deployment: str) -> None:
    llm = LLM("tiny-random", deployment)

    def generate() -> list[RequestOutput]:
        params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
        return llm.generate([[1, 2, 3]] * 8, params)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(generate)
        while not (llm.engine.stats().num_running or job.done()):
            time.sleep(0.001)
        llm.close()
        assert {output.outputs[0].finish_reason for output in job.result(SECONDS)} == {"abort"}


def test_an_interrupt_leaves_an_llm_as_it_was(llm: LLM) -> None:
    def tokens() -> list[int]:
        return llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids

    before = tokens()
    timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            [[number, 2, 3] for number in range(8)], SamplingParams(max_tokens=1500, ignore_eos=True)
        )
    assert tokens() == before
    assert llm.engine.stats().num_running == 0


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_copied(llm: LLM, copy_of: Callable[[LLM], object]) -> None:
    with pytest.raises(XDeepServeError, match="cannot be copied or sent to another process; make an LLM"):
        copy_of(llm)


def test_arguments_that_no_json_can_have_are_refused(llm: LLM) -> None:
    within: dict[str, object] = {}
    within["itself"] = within
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    for arguments in (within, {"a": deep}, {"a": {1, 2}}):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(RequestError, match="arguments must be an object or its JSON"):
            llm.chat([{"role": "assistant", "tool_calls": [call]}], GREEDY)


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    chat = llm.chat(begun, GREEDY, continue_final_message=True)
    assert llm.tokenizer is not None
    assert chat.prompt_token_ids == llm.tokenizer.apply_chat_template(begun, False, None, True)
    assert llm.tokenizer.decode(chat.prompt_token_ids).endswith("So")
    with pytest.raises(RequestError, match="prefix is not supported; use continue_final_message"):
        llm.chat([*begun[:1], {**begun[1], "prefix": True}], GREEDY)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user", "content": "Hi"}, "found {'content': 'Hi', 'role': 'user'}; put it into a list"),
        ("Hi", "found 'Hi'"),
        ([{"role": "user"}], "messages[0].content is required"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a text or a list of parts, found 5"),
        ([{"content": "Hi"}], "messages[0].role must be a text such as user, found null"),
        (
            [{"role": "assistant", "function_call": {"name": "f"}}],
            "messages[0].function_call is not supported; use tool_calls",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}],
            'messages[0].content[0].type must be text, found "tool_use"; use tool_calls of the message',
        ),
        ([{"role": "user", "content": "Hi", "images": ["x"]}], "this model reads text only"),
        ([{"role": "user", "content": "Hi", "reasoning": "Hm."}], "reasoning belongs to the role assistant"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text is required"),
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], 'must be a list, found {"name": "f"}'),
        ([{"role": "assistant", "tool_calls": ["f"]}], '{"name": ..., "arguments": ...}, found null'),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0].function.arguments must be an object or its JSON, found 5",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "args": {"k": 7}}]}],
            "messages[0].tool_calls[0].args is not supported; use arguments",
        ),
        ([{"role": "human", "content": "Hi"}], 'user, assistant, tool, developer, found "human"'),
    ],
    ids=str,
)
def test_refused_messages_say_what_would_do(llm: LLM, messages: list, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, GREEDY)
    assert str(refused.value).endswith(message)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"name": "f", "input_schema": {}}, "tools[0].name is not supported; use function"),
        ({"function": {"name": "f", "input_schema": {}}}, "input_schema is not supported; use parameters"),
        ({"type": "web_search"}, 'function must be {"name": ..., "parameters": ...}, found null'),
    ],
)
def test_refused_tools_say_what_would_do(llm: LLM, tool: dict, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, tools=[tool])
    assert str(refused.value).endswith(message)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[]], "empty"),
        ([""], "empty"),
        ([[1], [320]], "out of range"),
        ([[-1]], "out of range"),
        ([[0] * 2048], "context"),
        ([[1.7]], "token ids"),
        ([1.7], "token ids"),
        ([[1, True]], "token ids"),
        ([[10**5000]], "out of range"),
        (["\udcff"], "Unicode"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refused_prompts_leave_nothing_behind(llm: LLM, prompts: list, match: str) -> None:
    steps = llm.engine.je.tes[0].step_idx
    with pytest.raises(RequestError, match=match):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.je.tes[0].te_shell.has_work
    assert llm.engine.je.tes[0].step_idx == steps


@pytest.mark.parametrize("arrival", [-1, 0.5, float("nan"), 2**63, None, "1"])
def test_arrivals_are_whole_nanoseconds(llm: LLM, arrival: object) -> None:
    with pytest.raises(RequestError, match="arrivals_ns must be integers"):
        llm.generate([[1], [2]], GREEDY, arrivals_ns=[0, arrival])  # type: ignore[list-item]
    before = llm.virtual_ns
    assert len(llm.generate([[1], [2]], GREEDY, arrivals_ns=[5, np.int64(7)])) == 2  # type: ignore[list-item]
    assert type(llm.virtual_ns) is int
    assert llm.virtual_ns > before


def test_more_requests_than_places_are_all_served(llm: LLM) -> None:
    outputs = llm.generate([[i] for i in range(40)], GREEDY)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_refused_deployments_and_precisions(tiny: TinyCheckpoint) -> None:
    with pytest.raises(DeploymentError):
        LLM(tiny, "colocated", overrides=["hardware.hbm_mb=1"])
    with pytest.raises(InputError, match="precision"):
        LLM(tiny, precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="neither a preset"):
        LLM("no-such-model")


def test_a_closed_llm_says_so(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny)
    llm.close()
    llm.close()
    with pytest.raises(XDeepServeError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_same_seed_same_trace(tiny: TinyCheckpoint, tmp_path) -> None:
    digests = []
    for _ in range(2):
        with LLM(tiny, "colocated", overrides=["dies=2"], trace=True, clock_seed=3) as llm:
            llm.generate([[1, 2, 3], [4]], GREEDY)
            digests.append(llm.engine.plan.pod.trace.digest())
            llm.write_trace(tmp_path / "trace.json")
    assert digests[0] == digests[1]
    assert (tmp_path / "trace.json").stat().st_size > 10_000


def test_who_never_closes_sees_no_complaint() -> None:
    program = (
        "from xdeepserve import LLM;"
        "print(len(LLM('tiny-random', 'transformerless', progress=False).generate([[1, 2]])))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "1", "")


@pytest.mark.parametrize(
    ("deployment", "settings", "num_prompt", "num_new"),
    [
        ("monolithic", [], 61, 1),
        ("monolithic", ["cache.prefix=false"], 61, 1),
        ("pd", ["prefill.dies=1", "decode.dies=1"], 60, 3),
    ],
)
def test_more_choices_than_the_pool_holds_take_turns(
    deployment: str, settings: list[str], num_prompt: int, num_new: int
) -> None:
    prompt = [i % 200 for i in range(num_prompt)]
    params = SamplingParams(max_tokens=num_new, n=4, temperature=1.0, seed=1, ignore_eos=True)
    tight = [*settings, "max_model_len=64", "cache.num_blocks=4"]
    with LLM("tiny-random", deployment, overrides=tight) as llm:
        (found,) = llm.generate([prompt], params)
    with LLM("tiny-random", "monolithic", overrides=["max_model_len=64"]) as llm:
        (expected,) = llm.generate([prompt], params)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]


# ---- settings, as texts, mappings and keywords --------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"overrides": "prefill.dies=2"},
        {"overrides": ["prefill.dies=2"]},
        {"overrides": {"prefill.dies": 2}},
        {"overrides": {"prefill": {"dies": 2}}},
        {"overrides": ["prefill.dies=1", {"prefill": {"dies": 2}}]},
        {"prefill": {"dies": 2}},
        {"overrides": ["prefill.dies=4", "seed=0"], "prefill": {"dies": 2}},
    ],
    ids=str,
)
def test_settings_have_several_forms(given: dict) -> None:
    with LLM("tiny-random", "pd", **given) as llm:
        assert llm.engine.plan.deployment.prefill.dies == 2
        assert llm.engine.plan.deployment.seed == 0


def test_overrides_and_keywords_both_apply_and_keywords_come_last() -> None:
    with LLM("tiny-random", overrides={"seed": 5, "threads": 1}, seed=7) as llm:
        deployment = llm.engine.plan.deployment
        assert (deployment.seed, deployment.threads) == (7, 1)
    with LLM("tiny-random", deployment, max_model_len=64) as again:
        assert again.engine.plan.deployment.seed == 7
        assert again.engine.max_model_len == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"die": 4}, "unknown setting die; the nearest are dies"),
        ({"decode": {"die": 4}}, "unknown setting decode.die; the nearest are decode.dies"),
        ({"overrides": {"decode": {"die": 4}}}, "unknown setting decode.die; the nearest are decode.dies"),
        ({"modell": "tiny"}, "LLM: unknown setting modell (did you mean model?)"),
        ({"max_num_seqs": 4}, "unknown setting max_num_seqs; the nearest are prefill.max_num_seqs"),
        ({"overrides": ["dies"]}, "'dies' is not of the form key=value"),
        ({"overrides": [("dies", 4)]}, "'('dies', 4)' is not of the form key=value"),
        ({"overrides": 4}, "overrides are key=value texts or a mapping of settings, found 4"),
        ({"overrides": {4: 4}}, "unknown setting 4"),
    ],
    ids=str,
)
def test_refused_settings_say_what_would_do(given: dict, message: str) -> None:
    with pytest.raises(DeploymentError) as refused:
        LLM("tiny-random", "colocated", **given)
    assert message in str(refused.value)


def test_no_setting_is_called_as_a_parameter() -> None:
    """Else a keyword could mean either."""
    parameters = inspect.signature(LLM).parameters.keys() - {"settings"}
    assert not parameters & {*Deployment.__struct_fields__}


def test_repr_says_what_there_is() -> None:
    with LLM("tiny-random", "colocated", dies=2) as llm:
        said = "<LLM tiny-random, int8, colocated: 2 dies, 0 requests served, 0.00 ms of virtual time>"
        assert repr(llm) == said
        llm.generate([[1], [2]], GREEDY)
        llm.logits([1, 2])
        ms = f"{llm.virtual_ns / 1e6:.2f}"
        said = f"<LLM tiny-random, int8, colocated: 2 dies, 3 requests served, {ms} ms of virtual time>"
        assert repr(llm) == said
    assert repr(llm).startswith("<LLM tiny-random, int8, colocated: closed, 3 requests served, ")
    with LLM("deepseek-r1", timing_only=True, max_model_len=64, dies=64, deployment="colocated") as llm:
        assert repr(llm).startswith("<LLM deepseek-r1, time only, colocated: 64 dies, 0 requests")


# ---- what there is when something is lost -------------------------------------------------------------

# Its only decode TE loses a die, when the first prompt has been served; it is found out in little time.
LOSING = {
    "prefill": {"dies": 1},
    "decode": {"dies": 2},
    "health": {"probe_s": 0.01, "suspect_s": 0.02, "lost_s": 0.05, "beat_s": 0.01, "shell_lost_s": 0.1},
}
LOST_US = 60_000.0


def test_an_error_brings_what_was_generated(tiny: TinyCheckpoint) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = [GREEDY, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)]
    with LLM(tiny, max_model_len=128) as one_die:
        whole = one_die.generate(prompts, params, keep_logits=True)
    with LLM(tiny, "pd", faults=[Fault(LOST_US, 2, "lost")], **LOSING) as llm:
        with pytest.raises(XDeepServeError) as caught:
            llm.generate(prompts, params, keep_logits=True)
        assert repr(llm).startswith("<LLM tiny-random, int8, pd: has failed, 1 request served, ")
        with pytest.raises(XDeepServeError) as later:
            llm.generate(prompts, params)
        assert later.value.outputs == ()
        assert "until then" not in str(later.value)
    served, cut = caught.value.outputs
    assert served.outputs[0].token_ids == whole[0].outputs[0].token_ids
    assert (served.finished, served.error, served.outputs[0].finish_reason) == (True, None, "length")
    (choice,) = cut.outputs
    count = len(choice.token_ids)
    assert 1 < count < 60
    assert choice.token_ids == whole[1].outputs[0].token_ids[:count]
    assert np.array_equal(choice.logits, whole[1].outputs[0].logits[:count])
    assert (cut.finished, choice.finish_reason) == (False, "error")
    assert cut.metrics is not None
    assert cut.metrics.ttft_ns is not None
    assert caught.value.__cause__ is cut.error
    assert type(caught.value) is type(cut.error)
    said = f"; until then 1 of 2 prompts were complete, prompt 1 got {count} tokens"
    assert str(caught.value) == f"{cut.error}{said}"


def test_what_comes_after_the_loss_keeps_what_was_served_before() -> None:
    params = [GREEDY, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True), GREEDY]
    arrivals = [0, 0, round(1e9)]
    with (
        LLM("tiny-random", "pd", faults=[Fault(LOST_US, 2, "lost")], **LOSING) as llm,
        pytest.raises(XDeepServeError) as caught,
    ):
        llm.generate([[1, 2, 3], [4, 5, 6], [7]], params, arrivals_ns=arrivals)
    assert [output.finished for output in caught.value.outputs] == [True, False, False]
    assert caught.value.outputs[2].outputs == []


def test_messages_name_a_few_prompts_alone() -> None:
    def output(finished: bool) -> RequestOutput:
        choice = CompletionOutput(index=0, text="", token_ids=[5], finish_reason=None)
        error = None if finished else LostDieError("die 3 is lost")
        return RequestOutput(
            request_id="", prompt=None, prompt_token_ids=[], outputs=[choice], finished=finished, error=error
        )

    assert str(unfinished([output(False)])) == "die 3 is lost; until then the answer had 1 token"
    named = ", ".join(f"prompt {number} got 1 token" for number in range(1, 5))
    error = unfinished([output(True)] + 7 * [output(False)])
    said = f"die 3 is lost; until then 1 of 8 prompts were complete, {named}, 3 others got 3 tokens"
    assert str(error) == said
    assert isinstance(error, LostDieError)


def test_generate_prints_what_there_is_and_then_the_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "faults.toml"
    plan.write_text(f'[[fault]]\nat_us = {LOST_US}\ndie = 2\nkind = "lost"\n')
    flat = [f"{section}.{key}={value}" for section, each in LOSING.items() for key, value in each.items()]
    settings = [part for setting in flat for part in ("--set", setting)]
    command = ["generate", "--model", "tiny-random", "--deployment", "pd", "--prompt-ids", "4,5,6"]
    command += ["--max-tokens", "60", "--ignore-eos", "--faults", str(plan), *settings]
    assert main(command) == 1
    said = capsys.readouterr()
    assert "finished   error\n" in said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("xdeepserve generate: error: ")]
    assert re.search(r"; until then the answer had \d+ tokens$", line)
    assert main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["outputs"][0]["finish_reason"] == "error"
    assert len(found["outputs"][0]["token_ids"]) > 1
    assert found["digest"] is None
    assert line.endswith(found["error"])
