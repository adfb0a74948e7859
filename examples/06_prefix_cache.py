"""Walkthrough 6: RTC, the prefix cache.

The latents of a prompt depend on its tokens and their positions only. So blocks of a finished request are
kept, in a radix tree of whole blocks, and the next prompt with the same beginning starts where they end.
Blocks that HBM has no room for may live on in host DRAM.

This script fills the cache, finds prefixes again, lets choices of one request share their prompt and copy a
block only when they write to it, pushes a prefix out to host DRAM and loads it back, gives a conversation a
key by which its blocks are fetched while the next turn still waits, and checks the bits.

    python examples/06_prefix_cache.py
"""

from __future__ import annotations

import msgspec

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.llm import digest

POD = ["max_model_len=96", "cache.num_blocks=6", "cache.num_host_blocks=12", "cache.load=always"]
SYSTEM = list(range(10, 52))  # 42 tokens that several prompts begin with: two whole blocks and a bit
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def title(text: str) -> None:
    print(f"\n--- {text}")


def show_tree(group: DPGroup) -> None:
    """The radix tree: a line for each block, indented by its depth."""
    print("the tree: [first..last token id] of each block's 16 tokens, below the block that it follows")
    for node in group.rtc.index.nodes():
        depth = len(node.path()) - 1
        hbm = "not in HBM" if node.slot is None else f"HBM block {node.slot}"
        host = "not in host DRAM" if node.host_slot is None else f"host block {node.host_slot}"
        first, last = node.tokens[0], node.tokens[-1]
        print(f"  {'    ' * depth}[{first}..{last}]  {hbm}, {host}")


def ask(llm: LLM, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> str:
    """Serve one prompt; say how much of it was found."""
    scheduler = llm.engine.groups[0].scheduler
    hits, rows = scheduler.prefixes.num_hits, num_rows(scheduler)
    outputs = llm.generate(prompt, params, keep_logits=True)
    hits, rows = scheduler.prefixes.num_hits - hits, num_rows(scheduler) - rows
    # The last new token of each choice is never an input, so no row is computed for it.
    new = params.n * ((params.max_tokens or 1) - 1)
    print(f"{name}: {len(prompt)} tokens, {hits} found in the cache; {rows} rows computed: ", end="")
    print(f"{rows - new} of the prompt, {new} of new tokens")
    return digest(outputs)


def num_rows(scheduler: Scheduler) -> int:
    """Token rows computed so far."""
    return sum(rows * steps for rows, steps in scheduler.stats.rows_per_step.items())


def main() -> None:
    with LLM("tiny-random", "monolithic", overrides=POD) as llm:
        group = llm.engine.groups[0]
        title("A first prompt, and another with the same beginning; 4 new tokens each")
        first = ask(llm, "A", [*SYSTEM, 1, 2, 3])
        ask(llm, "B", [*SYSTEM, 7, 8, 9])
        print("B found the two whole blocks that both begin with; the third block differs after 10 tokens.")
        show_tree(group)

        title("Four choices of one request share their prompt")
        four = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=4, ignore_eos=True)
        ask(llm, "C", [*SYSTEM, 4], four)
        print(
            "The 11 tokens that were not found are computed once; each of the 3 further choices computes only"
        )
        print("the prompt's last token again, in a copy of the last block, since a block with several users")
        print("is never written: 14 rows. Then come 3 rows for each choice's new tokens.")

        title("A prefix that leaves HBM")
        ask(llm, "D", [99] * 90)
        show_tree(group)
        match = group.rtc.match_by_prefix_token(SYSTEM)
        print(f"of A's beginning {len(match.ready)} blocks are in HBM and {len(match.saved)} in host DRAM")

        title("... and comes back")
        again = ask(llm, "A again", [*SYSTEM, 1, 2, 3])
        print(f"the same tokens and logits as the first time: {first == again}")
        group.scheduler.check_integrity()
        print(f"blocks in use: {round(group.rtc.usage * group.rtc.num_blocks)} of {group.rtc.num_blocks}")

        title("A conversation with a key")
        turn = msgspec.structs.replace(GREEDY, prompt_cache_key="a talk")
        said = [*range(200, 238)]
        said += llm.generate(said, turn)[0].outputs[0].token_ids
        named = group.rtc.match_by_id("a talk", said)
        print(f"after its first turn RTC keeps {len(named.ready)} blocks under the key 'a talk'")
        llm.generate([99] * 90, GREEDY)  # pushes them out
        named = group.rtc.match_by_id("a talk", said)
        print(
            f"another prompt needs all of HBM: {len(named.ready)} left there, {len(named.saved)} in host DRAM"
        )
        before = llm.engine.stats().num_prefetched_blocks
        next_turn = [*said, 5, 6, 7]
        llm.generate([[3] * 40, next_turn], [GREEDY, turn])
        fetched = llm.engine.stats().num_prefetched_blocks - before
        print(f"the next turn arrives behind a stranger; while it waits, {fetched} blocks are fetched")
        print(f"another conversation of that name finds {len(group.rtc.match_by_id('a talk', SYSTEM).ready)}")


if __name__ == "__main__":
    main()
