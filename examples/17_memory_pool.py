"""Walkthrough 17: the disaggregated memory pool (EMS), a block of KV followed byte by byte.

The DRAM of hosts over volumes, which outlive the process, is one pool. What a prompt's tokens leave in the KV
cache depends on these tokens alone, and here on no bit of the deployment that computed them. So a block's key
is a hash of its tokens, of the key before it, and of what decides about bits; whoever has the same key may
have the block: another task executor, another deployment, another process.

We follow one block: its key, its server, from the HBM of a die to DRAM and a volume, after a restart to DRAM
and HBM again; then somebody flips a byte of the file.

    python examples/17_memory_pool.py
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from xdeepserve import LLM, SamplingParams
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.pool_use import PoolUse
from xdeepserve.engine.plans import PoolPlace
from xdeepserve.hw.memory import Address
from xdeepserve.hw.volume import Key
from xdeepserve.llm import RequestOutput, digest

PROMPT = [(37 * i) % 300 for i in range(300)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
DIGESTS = []


def title(text: str) -> None:
    print(f"\n--- {text}")


def settings(directory: str) -> list[str]:
    return [f"ems.path={directory}", "ems.block_size=128", "ems.servers=3"]


def serve(llm: LLM) -> RequestOutput:
    """Serve the prompt, and say what of it was computed."""
    (output,) = llm.generate([PROMPT], PARAMS, keep_logits=True)
    DIGESTS.append(digest([output]))
    assert output.metrics is not None
    assert output.metrics.ttft_ns is not None
    cached = output.metrics.num_cached_tokens
    print(f"  {cached} tokens from caches, {len(PROMPT) - cached} computed; first token after ", end="")
    print(f"{output.metrics.ttft_ns / 1e6:.2f} ms of virtual time")
    return output


def told(what: str, data: bytes | memoryview) -> None:
    print(f"  {what:<30} {len(data)} bytes, {bytes(data[:8]).hex()}... = {short(data)}")


def short(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def in_hbm(llm: LLM, block: int) -> bytes:
    """A block of the pool as it lies in the KV blocks of the first die, in the pool's order."""
    group = llm.engine.groups[0]
    pool = group.scheduler.pool
    assert pool is not None
    memories, value = llm.engine.plan.pod.memories, bytearray(pool.cache.nbytes)
    nodes = group.rtc.index.match(PROMPT)[block * pool.count : (block + 1) * pool.count]
    for number, node in enumerate(nodes):
        assert node.slot is not None
        places = group.mem.kv.block_pieces("pool", PoolPlace(Address(0, 0), number, pool.count))
        pieces = group.mem.kv.block_pieces("hbm", node.slot)
        for (source, nbytes), (place, _) in zip(pieces, places, strict=True):
            value[place.offset : place.offset + nbytes] = memories.read(source, nbytes)
    return bytes(value)


def show_holding(pool: MemoryPool) -> None:
    """How many blocks lie in which tier of the pool, and what room they take."""
    use = pool.usage()
    for tier in ("dram", "volume"):
        count, nbytes = use[f"{tier} values"], use[f"{tier} bytes"]
        print(f"  in the pool's {tier:<6}: {count} blocks, {nbytes:,} bytes")


def use_of(llm: LLM) -> PoolUse:
    """The pool and the caches in it."""
    use = llm.engine.plan.pool_use
    assert use is not None
    return use


def first_run(directory: str) -> Key:
    """Compute the prompt, and look at the blocks that have gone to the pool."""
    with LLM("tiny-random", overrides=settings(directory)) as llm:
        title("A prompt is computed, and its full blocks go to the pool")
        serve(llm)
        cache, pool = use_of(llm).contexts, use_of(llm).pool
        assert cache is not None
        print(f"  root (weights, precision, layout): {cache.root.hex()}")
        keys = cache.keys(PROMPT)
        for number, key in enumerate(keys):
            server = pool.controller.servers[pool.controller.view().owner(key)]
            name = llm.engine.plan.pod.topology.name(server.node)
            print(f"  key {number} = H(key before, 128 tokens): {key.digest.hex()} -> {server.name}, {name}")
        title("The last of them, byte for byte")
        key = keys[-1]
        server = pool.controller.servers[pool.controller.view().owner(key)]
        told("in the HBM of die 0", in_hbm(llm, len(keys) - 1))
        lease = cache.client.pin(key)
        assert lease is not None
        assert lease.address is not None
        memories = llm.engine.plan.pod.memories
        told(f"in DRAM at {tuple(lease.address)}", memories.read(lease.address, lease.nbytes))
        cache.client.release(lease)
        value = server.volume.get(key)
        assert value is not None
        told(f"in {server.volume.path.name}", value)
        print(f"  with its digest over key and bytes: {server.volume.rows[key].digest.hex()}")
    return key


def second_run(directory: str, key: Key) -> Path:
    """A new process would find the same: the pool's DRAM is empty, its volumes are not."""
    with LLM("tiny-random", "colocated", overrides=[*settings(directory), "dies=2"]) as llm:
        title("After a restart, on another deployment")
        pool = use_of(llm).pool
        show_holding(pool)
        serve(llm)
        show_holding(pool)
        counts = pool.counts()
        print(f"  found in volumes: {counts['volume hits']} blocks, {counts['volume bytes']:,} bytes", end="")
        print("; in DRAM each takes a slot of 80 KiB")
        server = pool.controller.servers[pool.controller.view().owner(key)]
        told("in the HBM of die 0", in_hbm(llm, 1))
        return server.volume.path


def third_run(directory: str, path: Path) -> None:
    """Somebody damages the volume that has our block."""
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1
    path.write_bytes(data)
    with LLM("tiny-random", overrides=settings(directory)) as llm:
        title(f"One bit of {path.name} is flipped")
        serve(llm)
        pool = use_of(llm).pool
        counts = pool.counts()
        print(f"  mismatches: {counts['mismatches']}; stored again: {counts['puts']}")


def main() -> None:
    """Three runs on one directory."""
    with tempfile.TemporaryDirectory() as directory:
        key = first_run(directory)
        path = second_run(directory, key)
        third_run(directory, path)
    title("Every bit of every logit, three times")
    print(f"  {'equal' if len(set(DIGESTS)) == 1 else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
