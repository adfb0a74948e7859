"""Kernels that make the rows of MTP's passes, against their rules, written row by row."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.model.kernels import drafts as kernels
from xdeepserve.model.kernels.drafts import ENDS, KEPT, MENDED, ROWS

BLOCK = 4
LEFT = -7  # in outputs, what no kernel has written


class Share(NamedTuple):
    """A sequence in a step: it has computed `first` positions, and its last rows are `drafts`.

    Of its tokens `known` are beyond the rows before its drafts; without any it samples.
    """

    first: int
    tokens: list[int]
    drafts: list[int]
    known: list[int]
    sampled: list[int]  # after its last token, and after each draft
    scored: int  # rows before these whose logits are wanted, too

    @property
    def row_tokens(self) -> list[int]:
        return [*self.tokens, *self.drafts]

    @property
    def following(self) -> list[int]:
        """By row, the next token; -1 where it is sampled."""
        known = [*self.tokens[1:], *self.known[:1]]
        return known + [-1] * (len(self.row_tokens) - len(known))

    @property
    def after(self) -> list[int]:
        """Tokens that are sampled in this step, row by row."""
        return [] if self.known else self.sampled[: 1 + len(self.drafts)]

    @property
    def accepted(self) -> int:
        right = [draft == token for draft, token in zip(self.drafts, self.after, strict=False)]
        return [*right, False].index(False)


TOKENS = st.integers(0, 2)


@st.composite
def shares(draw: st.DrawFn) -> Share:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=4))
    known = draw(st.lists(TOKENS, max_size=2))
    drafts = [] if known else draw(st.lists(TOKENS, max_size=2))
    sampled = draw(st.lists(TOKENS, min_size=3, max_size=3))
    most = len(tokens) - (not known)  # the last one's logits are wanted anyway, if it samples
    return Share(draw(st.integers(1, 9)), tokens, drafts, known, sampled, draw(st.integers(0, most)))


class Row(NamedTuple):
    """A row of a pass, in the order of the kernels."""

    seq: int
    state: int
    token: int
    position: int
    slot: int


class Step:
    """Lists of a step, as its plan has them, with sequence s in blocks 10 s, 10 s + 1, ..."""

    def __init__(self, step: list[Share]) -> None:
        self.seq_of: list[int] = []
        self.positions: list[int] = []
        self.logit_rows: list[int] = []
        self.sampled: list[int] = []
        for seq, share in enumerate(step):
            begin, rows = len(self.seq_of), len(share.row_tokens)
            self.seq_of += [seq] * rows
            self.positions += range(share.first, share.first + rows)
            first = rows - len(share.after) - share.scored
            self.logit_rows += range(begin + first, begin + first + share.scored + len(share.after))
            self.sampled += [99] * share.scored + share.after
        self.slots = [seq * 10 * BLOCK + p for seq, p in zip(self.seq_of, self.positions, strict=True)]


def depth_1(step: list[Share]) -> Iterator[tuple[Row, bool]]:
    """All rows but rejected drafts, each with the next token, and whether it is the last sampled one."""
    lists, at = Step(step), 0
    for seq, share in enumerate(step):
        count = len(share.row_tokens) - len(share.drafts) + share.accepted
        for row in range(count):
            token = share.following[row]
            if token < 0:
                token = share.sampled[row + 1 - len(share.tokens)]
            place = at + row
            is_end = row == count - 1 and not share.known
            yield Row(seq, place, token, lists.positions[place], lists.slots[place]), is_end
        at += len(share.row_tokens)


def depth_2(step: list[Share], drafts: list[int]) -> Iterator[tuple[Row, bool]]:
    """Rows of depth 1 with one token further ahead, and one more before those of a sequence to be mended."""
    rows, num_mended = [row for row, _ in depth_1(step)], 0
    for seq, share in enumerate(step):
        own = [(place, row) for place, row in enumerate(rows) if row.seq == seq]
        first = own[0][1]
        if share.drafts and not share.accepted and first.slot % BLOCK:
            yield Row(seq, len(rows) + num_mended, first.token, first.position - 1, first.slot - 1), False
            num_mended += 1
        for (place, row), (_, following) in pairwise(own):
            yield row._replace(state=place, token=following.token), False
        place, last = own[-1]
        if not share.known:
            yield last._replace(state=place, token=drafts[seq]), True
        elif len(share.known) > 1:
            yield last._replace(state=place, token=share.known[1]), False


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.lists(shares(), max_size=4), st.data())
def test_kernels_make_the_rows_of_passes(step: list[Share], data: st.DataObject) -> None:
    lists, num_seqs = Step(step), len(step)
    seq_of, logit_rows, sampled = ints(lists.seq_of), ints(lists.logit_rows), ints(lists.sampled)
    num_drafts = ints([len(share.drafts) for share in step])
    num_accepted = np.full(num_seqs, LEFT, np.int32)  # of an earlier step, where this one samples nothing
    if len(logit_rows):
        token_ids = ints([token for share in step for token in share.row_tokens])
        kernels.accept(num_accepted, token_ids, seq_of, num_drafts, logit_rows, sampled)
        assert num_accepted.tolist() == [share.accepted for share in step]

    rows, ends = np.full((2, 5, len(seq_of)), LEFT, np.int32), np.full((3, num_seqs), LEFT, np.int32)
    counts, drafts = np.zeros(4, np.int32), np.full((num_seqs, 2), LEFT, np.int32)
    given_rows = seq_of, ints(lists.positions), ints(lists.slots)
    following = ints([token for share in step for token in share.following])
    by_seq = num_drafts, num_accepted
    kernels.first_rows(rows[0], ends, counts, drafts, *given_rows, following, *by_seq, logit_rows, sampled)
    assert (drafts == -1).all()
    made = check_rows(rows[0], ends, counts, [*depth_1(step)])
    logits_of_ends = [lists.logit_rows.index(row.state) for row, is_end in depth_1(step) if is_end]
    assert ends[2, : counts[ENDS]].tolist() == logits_of_ends

    tokens = data.draw(st.lists(TOKENS, min_size=num_seqs, max_size=num_seqs))
    drafts[:, 0] = tokens
    mended, kept = np.full(num_seqs, LEFT, np.int32), np.full((2, num_seqs), LEFT, np.int32)
    token_after = ints([share.known[1] if len(share.known) > 1 else -1 for share in step])
    kernels.next_rows(rows[1], ends, mended, kept, counts, rows[0], drafts, token_after, *by_seq, BLOCK)
    again = check_rows(rows[1], ends, counts, [*depth_2(step, tokens)])
    assert ends[2, : counts[ENDS]].tolist() == logits_of_ends
    assert mended[: counts[MENDED]].tolist() == [row.slot // BLOCK for row in again if row.state >= len(made)]
    last = [i for i, row in enumerate(made) if i + 1 == len(made) or made[i + 1].seq != row.seq]
    assert kept[:, : counts[KEPT]].tolist() == [last, [made[i].slot // BLOCK for i in last]]


def check_rows(
    rows: np.ndarray, ends: np.ndarray, counts: np.ndarray, expected: list[tuple[Row, bool]]
) -> list[Row]:
    """Compare a pass with what is expected, and nothing written behind it; return its rows."""
    made = [Row(*row) for row in rows[:, : counts[ROWS]].T.tolist()]
    assert made == [row for row, _ in expected]
    assert (rows[:, counts[ROWS] :] == LEFT).all()
    at = [i for i, (_, is_end) in enumerate(expected) if is_end]
    assert ends[:2, : counts[ENDS]].tolist() == [at, [made[i].seq for i in at]]
    return made
