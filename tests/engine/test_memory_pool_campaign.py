"""A memory pool whose process is killed, whose files are damaged, whose disk is full: equal bits, always.

A few of each here, many of each in `make campaign`.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.pool_prefixes import ALL, served
from xdeepserve.ems.directory import verify
from xdeepserve.model.presets import TinyCheckpoint

WRITER = """
import random, resource, sys
from xdeepserve import LLM, SamplingParams
from tests.engine.pool_prefixes import PROMPTS
path, limit = sys.argv[1], int(sys.argv[2])
settings = [f"ems.path={path}", "ems.block_size=16", "ems.servers=2", "ems.volume_mb=1"]
with LLM("tiny-random", overrides=settings) as llm:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    print("ready", flush=True)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    llm.generate(PROMPTS, params)
    for seed in range(10 if limit else 10**6):
        rng = random.Random(seed)
        llm.generate([[rng.randrange(300) for _ in range(120)] for _ in range(4)], params)
    print(llm.engine.stats().pool["failed writes"], flush=True)
"""
ROOT = Path(__file__).parent.parent.parent


def writer(path: Path, limit: int = 0) -> subprocess.Popen[bytes]:
    """A process that writes to a pool for ever, or until files may not grow any more; it is ready."""
    command = [sys.executable, "-c", WRITER, str(path), str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def some(count: int, few: int) -> list[object]:
    """Seeds, of which all but a few are for the campaign."""
    return [seed if seed < few else pytest.param(seed, marks=pytest.mark.campaign) for seed in range(count)]


@pytest.mark.parametrize("seed", some(50, few=2))
def test_killed_at_any_moment(tiny: TinyCheckpoint, tmp_path: Path, seed: int) -> None:
    expected = served(None, tiny)[0]
    with writer(tmp_path) as process:
        time.sleep(random.Random(seed).uniform(0, 0.8))
        process.kill()
    assert all(not report.num_bad for report in verify(tmp_path))
    assert served(tmp_path, tiny)[0] == expected
    assert served(tmp_path, tiny)[:2] == (expected, ALL)


@pytest.mark.parametrize("seed", some(100, few=0))
def test_any_byte_is_damaged(tiny: TinyCheckpoint, tmp_path: Path, seed: int) -> None:
    expected, rng = served(None, tiny)[0], random.Random(1000 + seed)
    served(tmp_path, tiny)
    path = sorted(tmp_path.glob("*.sqlite"))[seed % 2]
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    assert served(tmp_path, tiny)[0] == expected
    assert served(tmp_path, tiny)[:2] == (expected, ALL)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit of file sizes here")
def test_a_full_disk(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    expected = served(None, tiny)[0]
    with writer(tmp_path, limit=200_000) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
    assert process.returncode == 0
    assert all(not report.num_bad for report in verify(tmp_path))
    assert served(tmp_path, tiny)[0] == expected
    assert served(tmp_path, tiny)[:2] == (expected, ALL)


def test_a_smaller_volume(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    expected = served(None, tiny)[0]
    served(tmp_path, tiny, "ems.volume_mb=4", "ems.block_size=16")
    for settings in (("ems.volume_mb=1",), ("ems.dram_mb=1",), ("ems.servers=1",), ("ems.servers=5",)):
        assert served(tmp_path, tiny, *settings)[0] == expected
    assert served(tmp_path, tiny)[:2] == (expected, ALL)
