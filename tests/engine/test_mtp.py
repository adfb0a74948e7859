"""Two drafts per step: the same tokens and logits as without, and the drafts that the equations make."""

from collections.abc import Sequence as Seq

import pytest

from tests.tools import one_die
from xdeepserve.corpus import chat
from xdeepserve.engine.dp.events import Event, StepEnded
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.history import History, serve
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference
from xdeepserve.model.weights import RECIPES, Recipe

PROMPTS = [[5, 6, 7], list(range(20, 61)), [200], list(range(20, 45))]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, n=1 + (i == 3))
    for i in range(len(PROMPTS))
]


def served(recipe: Recipe, deployment: str, overrides: Seq[str]) -> str:
    settings = ("max_model_len=128", *overrides)
    told = serve(History(deployment, settings, PROMPTS, PARAMS, precision=recipe, model="tiny"))
    assert len(told.stats.num_drafted) == (2 if "mtp=2" in overrides else 0)
    return told.digest


@pytest.fixture(scope="module")
def expected() -> dict[Recipe, str]:
    return {recipe: digest(one_die(PROMPTS, PARAMS, recipe, "tiny", max_model_len=128)) for recipe in RECIPES}


TIGHT = ("cache.num_blocks=8", "scheduler.max_num_seqs=4")
WAYS = [
    ("monolithic", []),
    ("monolithic", ["scheduler.max_num_batched_tokens=13", "scheduler.max_num_seqs=4"]),
    ("monolithic", [*TIGHT, "cache.preemption=swap", "cache.num_host_blocks=16", "cache.load=always"]),
    ("colocated", ["dies=2", *TIGHT]),
    ("colocated", ["dies=2", "tp=2"]),
    ("colocated", ["dies=2", "tp=2", "tp_mode=sp-tp-sp"]),
    ("pd", ["prefill.dies=1", "decode.dies=2"]),
    ("moe-attention", ["attention.microbatches=3"]),
    ("transformerless", []),
    ("transformerless", ["lockstep=true"]),
    ("colocated", ["dies=3", "lockstep=true", *TIGHT]),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize("reuse", [False, True], ids=["two layers", "one layer twice"])
@pytest.mark.parametrize(("deployment", "overrides"), WAYS)
def test_two_drafts_change_no_bit(
    expected: dict[Recipe, str], deployment: str, overrides: list[str], reuse: bool
) -> None:
    recipe = RECIPES[len(overrides) % 2]
    settings = [*overrides, "mtp=2", f"mtp_reuse={str(reuse).lower()}"]
    assert served(recipe, deployment, settings) == expected[recipe]


@pytest.mark.thin(2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_drafts_are_those_of_the_reference(recipe: Recipe, reuse: bool) -> None:
    """Also after rejections, which the second layer's cache must survive: the sequence stays in one block."""
    seen: list[tuple[list[int], list[int], int, int]] = []  # tokens known, drafts, offered, accepted
    settings = ["mtp=2", f"mtp_reuse={str(reuse).lower()}", "cache.block_size=64", "max_model_len=64"]
    with LLM("tiny", "monolithic", recipe, overrides=settings) as llm:
        known: dict[int, list[int]] = {}

        def see(event: Event | StepEnded) -> None:
            for share in event.shares if isinstance(event, StepEnded) else ():
                known[share.seq_id] += share.token_ids
                seen.append(
                    ([*known[share.seq_id]], [*share.proposed], len(share.drafts), share.num_accepted)
                )

        llm.engine.observe(see)
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        assert llm.tokenizer is not None
        texts = [llm.tokenizer.encode(text) for text in ("What is 47 + 25?", chat.render("What is 47 + 25?"))]
        for seq_id, prompt in enumerate([[5, 6, 7], *texts]):
            known[seq_id] = [*prompt]
            llm.generate(prompt, params)
    reference = Reference(resolve_model("tiny"), recipe)
    for tokens, drafts, _, _ in seen[::2]:  # a cache that has been spoiled stays so
        first = int(reference.mtp_logits(tokens)[-1].argmax())
        second = int(reference.mtp_logits([*tokens, first], 2, reuse)[-1].argmax())
        assert drafts == [first, second]
    assert {accepted for _, _, offered, accepted in seen if offered} >= ({0, 1, 2} if reuse else {0, 1})


@pytest.mark.parametrize("mtp", [1, 2])
def test_a_step_without_samples_after_one_that_accepted_drafts(mtp: int) -> None:
    """What the die wrote of acceptance is then of an earlier step."""
    prompt, params = list(range(30, 70)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    answers = []
    for overrides in ([], [f"mtp={mtp}", "mtp_reuse=true", "scheduler.max_num_batched_tokens=48"]):
        with LLM("tiny", overrides=[*overrides, "cache.prefix=false"]) as llm:
            if overrides:
                llm.generate(chat.render("What is 47 + 25?"), SamplingParams(max_tokens=9, temperature=0.0))
                assert sum(llm.engine.stats().num_accepted) > 0
            answers.append(digest(llm.generate([prompt * 3], params, keep_logits=True)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("timing_only", [False, True])
@pytest.mark.parametrize("mtp", [1, 2])
def test_rows_of_each_pass_are_made_by_a_launch_on_the_die(mtp: int, timing_only: bool) -> None:
    settings = [f"mtp={mtp}"]
    with LLM("tiny-random", overrides=settings, timing_only=timing_only, trace=True) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        spans = [span for span in llm.engine.plan.pod.trace.spans if span.name in ("DraftRows", "Draft")]
    spans.sort(key=lambda span: span.start_ns)
    assert [span.name for span in spans[: 2 * mtp]] == ["DraftRows", "Draft"] * mtp
    assert len(spans) % (2 * mtp) == 0
    assert all(span.lane == "AIV" and span.end_ns > span.start_ns for span in spans[::2])


def test_a_checkpoint_with_one_mtp_layer_uses_it_twice() -> None:
    with LLM("tiny-random", overrides=["mtp=2"]) as llm:
        assert llm.engine.plan.tes[0].sizes.steps.num_mtp_layers == 1
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        assert len(llm.engine.stats().num_drafted) == 2


def test_acceptance_is_counted_by_position() -> None:
    with LLM("tiny", overrides=["mtp=2", "mtp_reuse=true"]) as llm:
        params = SamplingParams(max_tokens=60, temperature=0.0)
        [output] = llm.generate(["Once upon a time"], params)
        stats, metrics = llm.engine.stats(), output.metrics
        steps = llm.engine.je.tes[0].step_idx
    assert metrics is not None
    first, second = metrics.accepted_by_position
    assert metrics.drafts_by_position[0] >= metrics.drafts_by_position[1] > 0
    assert metrics.drafts_by_position[0] >= first >= second > 0
    assert metrics.num_accepted == first + second == sum(stats.num_accepted)
    assert stats.num_drafted == metrics.drafts_by_position
    # The first step is the prompt's; the last may make more tokens than were wanted.
    assert 60 <= steps + first + second <= 62
