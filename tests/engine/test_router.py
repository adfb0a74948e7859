"""Step 1: which TE gets a request, by cache status, prompt length and load; and several job executors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.engine.links import PARAMS, PROMPTS
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.engine.dp.events import Assigned, Observed
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.evals.samples import examined
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

FEWEST = ["prefill.dies=1", "decode.dies=1", "prefill.count=2", "max_model_len=256"]
TWO = [*FEWEST, "scheduler.route=cost"]
SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def assigned(llm: LLM) -> dict[int, str]:
    """The first TE of each sequence, from now on."""
    found: dict[int, str] = {}

    def see(event: Observed) -> None:
        if isinstance(event, Assigned):
            found.setdefault(event.seq_id, event.te)

    llm.engine.observe(see)
    return found


@pytest.mark.parametrize("executors", [1, 3])
def test_every_repeat_of_a_prefix_finds_it(tiny: TinyCheckpoint, executors: int) -> None:
    """Conversations on two prefill TEs, each turn the one before and more."""
    settings = [*TWO, "cache.num_blocks=64", f"scheduler.job_executors={executors}"]
    with LLM(tiny, "pd", overrides=settings) as llm:
        places = assigned(llm)
        turns = [[10 * i + j % 7 for j in range(70)] for i in range(6)]
        for turn in range(3):
            outputs = llm.generate(turns, SHORT)
            for output in outputs:
                assert (output.metrics.num_cached_tokens > 0) == (turn > 0)
            turns = [turn + [1, 2, 3] * 6 for turn in turns]
        assert {*places.values()} == {"prefill 0", "prefill 1"}
        for first in range(6):
            assert len({places[first + 6 * turn] for turn in range(3)}) == 1


def test_job_executors_hear_late_of_caches_and_a_broken_promise_costs_no_bit(tiny: TinyCheckpoint) -> None:
    """A prefix comes, and goes as others need its blocks: for a second the prompt tree is wrong."""
    first, others = [[3] * 64], [[30 * i + j for j in range(64)] for i in range(8)]
    prompts = [*first, *first, *others, *first, *first]
    late_s = 1.0
    seconds = [0.0, 0.5 * late_s, *[2.0 * late_s] * len(others), 2.5 * late_s, 4.0 * late_s]
    settings = [*FEWEST, "max_model_len=96", "cache.num_blocks=12", "scheduler.route=prefix"]
    with LLM(tiny, "pd", overrides=[*settings, f"scheduler.hint_age_ms={1000 * late_s}"]) as llm:
        outputs = llm.generate(
            prompts, SHORT, keep_logits=True, arrivals_ns=[round(1e9 * s) for s in seconds]
        )
        stats = llm.engine.stats()
    assert digest(outputs) == digest(one_die(prompts, SHORT, "int8"))
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert (cached[1], cached[-2], cached[-1]) == (48, 0, 48)  # known to nobody; gone; there again
    assert (stats.num_promised, stats.num_broken) == (96, 48)  # of the last two


def test_long_prompts_have_a_te_of_their_own(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("balance.te_policies", "balance.te_ledger"):
        monkeypatch.setattr(f"xdeepserve.engine.{module}.LONG_PROMPT", 100)
    prompts = [[i] * (200 if i % 2 else 5) for i in range(12)]
    with LLM(tiny, "pd", overrides=[*TWO, "cache.num_blocks=256"]) as llm:
        places = assigned(llm)
        llm.generate(prompts, SHORT)
        long, short = ({places[i] for i in range(12) if i % 2 == odd} for odd in (1, 0))
        assert not long & short


def test_several_job_executors_and_the_same_requests_take_the_same_ways(tiny: TinyCheckpoint) -> None:
    ways, digests = [], set()
    for executors in (1, 4, 4):
        with LLM(tiny, "pd", overrides=[*TWO, f"scheduler.job_executors={executors}"]) as llm:
            places = assigned(llm)
            digests.add(digest(llm.generate(PROMPTS * 2, PARAMS, keep_logits=True)))
            ways.append(dict(places))
            router = llm.engine.je.router
            seqs: list[Any] = [SimpleNamespace(seq_id=seq_id, je=None) for seq_id in range(64)]
            assert {router.reached(seq) for seq in seqs} == {*range(executors)}
            known: list[Any] = [SimpleNamespace(seq_id=seq_id, je=2) for seq_id in range(64)]
            assert {router.reached(seq) for seq in known} == {2 % executors}
            assert not any(ledger.given for ledger in router.ledgers)
    assert len(digests) == 1
    assert ways[1] == ways[2] != ways[0]


def test_by_default_the_te_with_the_fewest_sequences_gets_a_request(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "pd", overrides=FEWEST) as llm:
        places = assigned(llm)
        llm.generate(PROMPTS, PARAMS)
        assert [places[i] for i in range(len(PROMPTS))] == ["prefill 0", "prefill 1"] * (len(PROMPTS) // 2)


def test_no_job_executor_is_refused() -> None:
    with pytest.raises(DeploymentError, match="job_executors must be at least 1, found 0"):
        LLM("tiny-random", "pd", overrides=["scheduler.job_executors=0"])


HEAT = HeatMap(
    "a test", (1, 30), (1, 6), (1.0,), (((-0.1, -0.1), (0.1, -0.1)),)
)  # long prompts, short answers
BOTH_KINDS = """
kind = "mixed"
[[te]]
role = "prefill"
dies = 1
count = 2
[[te]]
role = "decode"
dies = 1
[[te]]
dies = 1
count = 2
"""


def two_kinds(folder: Path) -> tuple[str, str]:
    """Files of a deployment with TEs of both kinds, and of a heat map."""
    deployment, heat = folder / "kinds.toml", folder / "heat.json"
    deployment.write_text(BOTH_KINDS)
    heat.write_bytes(msgspec.json.encode(HEAT))
    return str(deployment), str(heat)


@pytest.mark.parametrize("route", ["pd-aware", "deepserve"])
def test_the_heat_map_says_which_kind_of_te_has_a_request(
    tiny: TinyCheckpoint, tmp_path: Path, route: str
) -> None:
    """Lengths of answers are known where nothing else ends them; who is of another kind than before has the
    same bits."""
    deployment, heat = two_kinds(tmp_path)
    prompts = [[5 * i + j % 9 for j in range(40 if i % 2 else 8)] for i in range(16)]
    params = [SHORT if i % 4 < 2 else msgspec.structs.replace(SHORT, max_tokens=9) for i in range(16)]
    expected = digest(one_die(prompts, params, max_model_len=256))
    settings = ["max_model_len=256", f"scheduler.route={route}", f"scheduler.heat={heat}"]
    with LLM(tiny, deployment, overrides=settings) as llm:
        roles = {te.sizes.place.name: te.sizes.place.role for te in llm.engine.je.tes}
        places = assigned(llm)
        assert digest(llm.generate(prompts, params, keep_logits=True)) == expected
        found = [roles[places[i]] for i in range(16)]
        assert found == ["prefill" if i % 4 == 1 else "both" for i in range(16)]
        assert len(set(places.values())) >= 3, "not one TE of a kind alone"
    with LLM(tiny, deployment, overrides=settings[:1]) as llm:
        assert digest(llm.generate(prompts, params, keep_logits=True)) == expected


def test_answers_are_predicted_from_the_tokens_of_prompts(tmp_path: Path) -> None:
    """`tiny` recalls a fact in a few tokens, and tells stories at length."""
    deployment, heat = two_kinds(tmp_path)
    outputs = (1, 48)
    map_of_answers = HeatMap("a test", (1,), outputs, (1.0,), (((0.1, -0.1),),))
    Path(heat).write_bytes(msgspec.json.encode(map_of_answers))
    samples = [examined(domain, index) for index in range(4) for domain in ("recall", "stories")]
    settings = ["max_model_len=512", "scheduler.route=pd-aware", f"scheduler.heat={heat}"]
    with LLM("tiny", deployment, overrides=settings) as llm:
        roles = {te.sizes.place.name: te.sizes.place.role for te in llm.engine.je.tes}
        places = assigned(llm)
        params = SamplingParams(max_tokens=200, temperature=0.0)
        found = llm.generate([each.prompt for each in samples], params)
    for index, output in enumerate(found):
        is_short = len(output.outputs[0].token_ids) < outputs[1]
        assert (roles[places[index]] == "prefill") == is_short == (index % 2 == 0)


def test_pd_aware_without_a_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"route=pd-aware looks .* in a heat map: set scheduler.heat"):
        LLM("tiny-random", "pd", overrides=["scheduler.route=pd-aware"])
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(InputError, match=r"heat map .*no.json: hardware is missing"):
        LLM(
            "tiny-random", "pd", overrides=["scheduler.route=deepserve", f"scheduler.heat={tmp_path}/no.json"]
        )


@pytest.mark.parametrize("route", list(ROUTE.rows))
def test_no_policy_changes_a_bit(tiny: TinyCheckpoint, tmp_path: Path, route: str) -> None:
    """Conversations, one turn after the other: digests are those of one die, and every TE has its share."""
    settings = [*FEWEST, f"scheduler.route={route}", "cache.num_blocks=64"]
    if route in ("pd-aware", "deepserve"):
        settings.append(f"scheduler.heat={two_kinds(tmp_path)[1]}")
    turns = [[10 * i + j % 7 for j in range(40)] for i in range(6)]

    def twice(llm: LLM) -> list[str]:
        return [digest(llm.generate(turns, PARAMS, keep_logits=True)) for _ in range(2)]

    with LLM(tiny, "monolithic", overrides=["max_model_len=256"]) as llm:
        expected = twice(llm)
    with LLM(tiny, "pd", overrides=settings) as llm:
        places = assigned(llm)
        assert twice(llm) == expected
        if route in ("round-robin", "sequences", "pd-aware"):
            assert [places[i] for i in range(12)] == ["prefill 0", "prefill 1"] * 6
        if route == "prefix":
            assert [places[i + 6] for i in range(6)] == [places[i] for i in range(6)]
