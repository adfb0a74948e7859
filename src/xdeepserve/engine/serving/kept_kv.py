"""KV of the well dies of a lost TE, for the TE in its place (xDeepServe 6.2, stage 2: scale-down in place).

A TE that has lost a die comes up again on the dies that are well, with fewer DP groups. What these dies
computed before is still right: the full blocks in a group's prefix index. Where a new DP group has exactly
the dies of an old one, it takes these blocks over as cached prefixes, and sequences that were there go on
from them. Only the tokens after a sequence's last full block are computed again.

Pages of KV do not move, they are only mapped anew, so this takes no virtual time. What was on a die that is
lost, has bad pages or fails the self test is not kept; nor is content in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.prefix_index import Node
from xdeepserve.engine.te.te import TE
from xdeepserve.hw.pod import Pod


class KeptPrefix(NamedTuple):
    """A cached block: the tokens of its prefix, its own at the end, and its bytes on each die, by piece."""

    tokens: list[int]
    pieces: list[list[bytes]]


class KeptGroup(NamedTuple):
    """Cached blocks of a DP group, and the sequences that were there."""

    prefixes: list[KeptPrefix]
    seq_ids: list[int]


class KeptKV:
    """Cached blocks of a TE's DP groups, by the groups' dies; taken before the TE is given up."""

    def __init__(self, pod: Pod, te: TE) -> None:
        self._pod = pod
        gone = {*pod.lost, *pod.memories.silent, *pod.memories.bad_pages}
        groups = {tuple(die.index for die in group.dies): group for group in te.groups}
        self._groups = {
            dies: KeptGroup(self._read(group), [seq.seq_id for seq in group.places.sequences()])
            for dies, group in groups.items()
            if gone.isdisjoint(dies)
        }

    def _read(self, group: DPGroup) -> list[KeptPrefix]:
        """Copy the group's ready blocks, the least recently used first."""
        nodes = [node for node in group.rtc.index.nodes() if all(each.is_ready for each in node.path())]
        nodes.sort(key=lambda node: node.last_used)
        return [KeptPrefix(_prefix(node), self._bytes(group, node.slot)) for node in nodes]

    def _bytes(self, group: DPGroup, slot: int | None) -> list[list[bytes]]:
        assert slot is not None
        by_die = [group.block_pieces([slot], rank) for rank in range(len(group.dies))]
        return [[bytes(self._pod.memory(a.node).read(a.offset, n)) for a, n in pieces] for pieces in by_die]

    def drop(self, dies: Collection[int]) -> None:
        """Drop the KV of groups that have some of these dies."""
        self._groups = {own: kept for own, kept in self._groups.items() if set(own).isdisjoint(dies)}

    def in_order(self, dies: Iterable[int]) -> list[int]:
        """Sort dies so that a TE on the first of them has as many of the old DP groups as it can."""
        free = set(dies)
        whole = [die for own in self._groups if free.issuperset(own) for die in own]
        return whole + sorted(free.difference(whole))

    def give(self, te: TE) -> int:
        """Give blocks to the DP groups of a TE that have the same dies; return the number of blocks.

        If a group has room for fewer, it gets those that were used last. The sequences that were in a group
        will come back to it.
        """
        num_given = 0
        for group in te.groups:
            kept = self._groups.get(tuple(die.index for die in group.dies))
            if kept is not None:
                num_given += self._give(group, kept.prefixes)
                te.te_shell.returning.update(dict.fromkeys(kept.seq_ids, group))
        return num_given

    def _give(self, group: DPGroup, kept: list[KeptPrefix]) -> int:
        rtc, num_given = group.rtc, 0
        kept = kept[-rtc.num_available :]
        for prefix in sorted(kept, key=lambda prefix: len(prefix.tokens)):
            last = len(prefix.tokens) // rtc.block_size - 1
            if rtc.missing(prefix.tokens, 0, last + 1) != [last]:  # no room for the blocks before it
                continue
            ticket, slots = rtc.expect(prefix.tokens, [last])
            for rank, pieces in enumerate(prefix.pieces):
                places = group.block_pieces(slots, rank)
                for (address, _), data in zip(places, pieces, strict=True):
                    self._pod.memory(address.node).write(address.offset, data)
            rtc.finish(ticket)
            num_given += 1
        for prefix in kept:
            rtc.touch(rtc.match_by_prefix_token(prefix.tokens).ready)
        return num_given


def _prefix(node: Node) -> list[int]:
    """Return the tokens from the first block of a prefix to the last token of `node`."""
    return [token for each in node.path() for token in each.tokens]
