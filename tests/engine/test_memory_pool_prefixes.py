"""Prompts whose KV comes from a memory pool: the same bits, less to compute, whoever wrote it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.pool_prefixes import ALL, PARAMS, PROMPTS, served
from tests.model.hf_fixtures import fixtures
from xdeepserve import LLM, SamplingParams
from xdeepserve.ems.context_cache import BITS
from xdeepserve.ems.directory import open_volumes
from xdeepserve.ems.mp_server import MPServer
from xdeepserve.engine.dp import events
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.presets import TinyCheckpoint, resolve_model


def test_who_has_the_same_root_finds_it_and_nobody_else(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    expected = served(None, tiny)[0]
    digest_of, cached, counts = served(tmp_path, tiny)
    assert (digest_of, cached) == (expected, [0, 0, 0])
    assert counts["puts"] == sum(len(prompt) // 16 for prompt in PROMPTS)
    digest_of, cached, counts = served(tmp_path, tiny)
    assert (digest_of, cached) == (expected, ALL)
    assert counts["volume hits"] == sum(ALL) // 16
    assert counts["puts"] == 0
    assert served(tmp_path, tiny, deployment="colocated")[:2] == (expected, ALL)
    for other in (
        {"precision": "fp32"},
        {"model": resolve_model("tiny")},
        {"overrides": ("mtp=1",)},
        {"overrides": ("combine=int8",)},
        {"overrides": ("ems.block_size=32",)},
        {"overrides": ("ems.namespace=other",)},
    ):
        given = {"model": tiny, "overrides": (), "precision": "int8", **other}
        model, overrides, precision = given["model"], given["overrides"], str(given["precision"])
        assert isinstance(overrides, tuple)
        plain = served(None, model, *[each for each in overrides if "ems" not in each], precision=precision)
        assert served(tmp_path, model, *overrides, precision=precision)[:2] == (plain[0], [0, 0, 0])


def test_blocks_of_tokens_that_were_generated_are_kept_if_asked_for(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    for wanted, keeps in ((96, False), (128, True)):
        path = tmp_path / str(keeps)
        path.mkdir()
        settings = [f"ems.path={path}", "ems.block_size=32", f"ems.decode_blocks={str(keeps).lower()}"]
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        with LLM(tiny, overrides=settings) as llm:
            said = PROMPTS[0] + llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids
        with LLM(tiny, overrides=settings) as llm:
            (output,) = llm.generate([said], params)
            assert output.metrics is not None
            assert output.metrics.num_cached_tokens == wanted


def test_prompts_that_begin_alike_wait_for_one_load(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    settings = [f"ems.path={tmp_path}", "ems.block_size=16"]
    with LLM(tiny, overrides=settings) as llm:
        llm.generate([PROMPTS[0]], PARAMS)
    with LLM(tiny, overrides=settings) as llm:
        outputs = llm.generate([PROMPTS[0], [*PROMPTS[0][:96], 5, 6], PROMPTS[0]], PARAMS)
        assert [o.metrics.num_cached_tokens for o in outputs if o.metrics is not None] == [96] * 3
        assert llm.engine.stats().pool["volume hits"] == 6


PHASES = {"begin": "begin", "commit": "end", "pin": "pin", "promote": "promote", "release": "release"}


@pytest.mark.thin(3)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_server_that_is_lost_at_any_phase_costs_hits_and_no_bit(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, is_before: bool
) -> None:
    expected = served(None, tiny)[0]
    served(tmp_path, tiny)
    whole, lost = getattr(MPServer, PHASES[phase]), []

    def failing(server: MPServer, *args: object) -> object:
        if not lost and is_before:
            lost.append(server)
            server.lose()
        result = whole(server, *args)
        if not lost:
            lost.append(server)
            server.lose()
        return result

    monkeypatch.setattr(MPServer, PHASES[phase], failing)
    more = ("mtp=1",) if phase in ("begin", "commit") else ()  # another root: all is written again
    assert served(tmp_path, tiny, *more)[0] == expected
    assert lost
    monkeypatch.undo()
    assert served(tmp_path, tiny)[:2] == (expected, ALL)


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_byte_costs_hits_and_no_bit(tiny: TinyCheckpoint, tmp_path: Path, seed: int) -> None:
    expected = served(None, tiny)[0]
    served(tmp_path, tiny)
    rng = random.Random(seed)
    path = sorted(tmp_path.glob("*.sqlite"))[seed % 2]
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    digest_of, cached, _ = served(tmp_path, tiny)
    assert digest_of == expected
    assert all(few <= most for few, most in zip(cached, ALL, strict=True))
    assert served(tmp_path, tiny)[:2] == (expected, ALL)  # what was lost has been written again


def refusal(*overrides: str, deployment: str = "monolithic", timing_only: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        LLM("tiny-random", deployment, overrides=overrides, timing_only=timing_only)
    return str(caught.value)


def test_what_will_not_do_is_refused_in_one_line(tmp_path: Path) -> None:
    where = f"ems.path={tmp_path}"
    (tmp_path / "file").touch()
    assert refusal(f"ems.path={tmp_path}/file/none").endswith(
        "/file: not a directory; a memory pool has one for its volumes"
    )
    texts: Sequence[tuple[str, str]] = [
        ("ems.quota_mb=0", "ems.quota_mb must be at least 1, found 0"),
        ("ems.servers=49", "ems.servers must be between 1 and 48, found 49"),
        ("ems.block_size=100", "ems.block_size must be a multiple of cache.block_size=16, found 100"),
        ("ems.namespace=a b", "ems.namespace must be 1 to 64 letters, digits, dots, dashes or underscores"),
        ("cache.prefix=false", "ems.path needs cache.prefix=true"),
    ]
    for setting, text in texts:
        assert text in refusal(where, setting)
    assert "ems.path must name a directory" in refusal("ems.path=")
    with LLM("tiny-random", overrides=[where]):
        assert "this memory pool is in use by another LLM of this process" in refusal(where)
    with LLM("tiny-random") as llm, pytest.raises(DeploymentError, match="from its start"):
        LLM("tiny-random", overrides=[where], beside=llm)


def test_models_on_one_pod_share_its_pool(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    expected = served(None, tiny)[0]
    settings = [f"ems.path={tmp_path}", "ems.block_size=16", "ems.servers=2"]
    with LLM("tiny", overrides=settings) as first:
        first.generate(PROMPTS, PARAMS)
        stored = first.engine.stats().pool["puts"]
        for cached in ([0, 0, 0], ALL):
            with LLM(tiny, overrides=[*settings, "ems.namespace=second"], beside=first) as second:
                outputs = second.generate(PROMPTS, PARAMS, keep_logits=True)
                assert digest(outputs) == expected
                assert [o.metrics.num_cached_tokens for o in outputs if o.metrics is not None] == cached
                assert second.engine.stats().pool["puts"] == 2 * stored
        assert first.generate(PROMPTS, PARAMS)[0].finished
    assert served(tmp_path, tiny, "ems.namespace=second")[:2] == (expected, ALL)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_hits_are_the_same_whichever_task_executor_is_chosen(
    tiny: TinyCheckpoint, tmp_path: Path, order: tuple[int, ...]
) -> None:
    served(tmp_path, tiny)
    settings = [f"ems.path={tmp_path}", "ems.block_size=16", "ems.servers=2", "prefill.count=3"]
    with LLM(tiny, "pd", overrides=[*settings, "prefill.dies=1", "decode.dies=1"]) as llm:
        chosen = set()
        llm.engine.observe(lambda event: chosen.add(event.te) if isinstance(event, events.Assigned) else None)
        outputs = llm.generate([PROMPTS[number] for number in order], PARAMS)
        cached = [each.metrics.num_cached_tokens for each in outputs if each.metrics is not None]
        assert cached == [ALL[number] for number in order]
        assert len(chosen) > 1


BLOCKS = {"int8": "5ff63f82450f775a89adbb96ed71c08d", "fp32": "0f705f89770c3dce15a8bd4c9813cab6"}


@pytest.mark.parametrize("precision", BLOCKS)
def test_the_bits_of_blocks_are_those_of_earlier_versions(
    tiny: TinyCheckpoint, tmp_path: Path, precision: str
) -> None:
    """If this fails, arithmetic has changed: raise `BITS` in ems/context_cache.py, so that blocks that were
    computed before are not found any more, and put the new digest here."""
    served(tmp_path, tiny, precision=precision)
    blocks = []
    for volume in open_volumes(tmp_path, []).values():
        blocks += [volume.get(key) or b"" for key in volume.rows]
        volume.close()
    sha = hashlib.blake2b(b"".join(sorted(blocks)), digest_size=16)
    assert all(blocks)
    assert (BITS, sha.hexdigest()) == (1, BLOCKS[precision])


@pytest.mark.thin(2)
@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize(
    ("name", "drafts", "apart"),
    [
        ("sparse-yarn-groups-mtp", "mtp=1", "index_k"),
        ("glm-sparse-shared-mtp", "mtp=1", "index_k"),
        ("qwen-every-layer-of-experts", "mtp=0", "latent"),
    ],
)
def test_all_pools_of_a_block_are_put_read_and_evicted_together(
    name: str, drafts: str, apart: str, precision: str, tmp_path: Path
) -> None:
    """An indexer's keys beside the latents that they choose from; keys and values of grouped queries."""
    fixture = next(each for each in fixtures() if each.name == name)
    model, pool = open_checkpoint(fixture.checkpoint_dir(tmp_path)), tmp_path / "pool"
    pool.mkdir()
    expected = served(None, model, drafts, precision=precision)[0]
    for deployment, cached in (("monolithic", [0, 0, 0]), ("monolithic", ALL), ("pd", ALL)):
        found = served(pool, model, drafts, deployment=deployment, precision=precision)
        assert found[:2] == (expected, cached)
    volumes = open_volumes(pool, [])
    sizes = {len(volume.get(key) or b"") for volume in volumes.values() for key in volume.rows}
    for volume in volumes.values():
        volume.close()
    settings = [f"ems.path={pool}", "ems.block_size=16", "ems.servers=2", "ems.dram_mb=1", "ems.volume_mb=1"]
    with LLM(model, "monolithic", precision, overrides=[*settings, drafts]) as llm:  # type: ignore[arg-type]
        memory = llm.engine.je.tes[0].executors[0].mem
        assert sizes == {memory.kv.block_nbytes}
        assert llm.engine.plan.pool_use is not None
        llm.engine.plan.pool_use.crowd()
        others = [[token + 1 for token in prompt] for prompt in PROMPTS]
        llm.generate(others, PARAMS)
        counts = llm.engine.stats().pool
        assert counts["dram evictions"] > 0
        assert counts["volume evictions"] > 0
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected
        llm.engine.plan.pool_use.pool.check_integrity()
        for cache in memory.kv.caches():
            getattr(cache, apart)[:] = 0  # were one part left behind, it would be found out
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) != expected


def test_dies_with_the_same_latents_write_a_share_each(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    settings = [
        f"ems.path={tmp_path}",
        "ems.block_size=16",
        "prefill.dies=4",
        "prefill.tp=4",
        "decode.dies=1",
    ]
    with LLM(tiny, "pd", overrides=settings, trace=True) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        pod = llm.engine.plan.pod
        written = [span for span in pod.trace.spans if span.name == "KV blocks"]
        assert {span.node for span in written} == set(range(4))
        assert llm.engine.stats().pool["puts"] == len(PROMPTS[0]) // 16
    expected = served(None, tiny)[0]
    assert served(tmp_path, tiny)[:2] == (expected, [*ALL[:1], 0, 0])


def test_a_prefix_goes_from_its_end(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Without its first block all others of a prompt would be of no use, and in the way of others."""
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(16 * blocks + 1)] for blocks in (60, 30, 50)]
    settings = [f"ems.path={tmp_path}", "ems.block_size=16", "ems.servers=1", "ems.volume_mb=1"]
    settings += ["max_model_len=1024", "scheduler.max_num_batched_tokens=256"]

    def cached(number: int) -> int:
        with LLM(tiny, overrides=settings) as llm:
            (output,) = llm.generate([prompts[number]], SamplingParams(max_tokens=1, temperature=0.0))
            assert output.metrics is not None
            return output.metrics.num_cached_tokens

    assert [cached(number) for number in (0, 1, 0)] == [0, 0, 960]  # the last one is the younger one again
    assert cached(2) == 0  # the oldest goes for it, and some of the next
    assert 800 < cached(0) < 960
    assert cached(1) == 0
