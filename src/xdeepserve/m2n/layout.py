"""The registered memory of M2N, and the content of a write's immediate.

With M attention dies and N expert dies, on an attention die:

    managed    tokens.out       rows for all expert dies, grouped by them: the registered tensor that is sent
    managed    answers.in [N]   a block for each expert die, which writes there
    metadata   stream           two words: the events that sending and receiving wait for

and on an expert die:

    managed    tokens.in [M]    a block for each attention die, which writes there
    managed    answers.out      rows for all attention dies, grouped by them
    metadata   stream           as above

Rows are those of dispatch and combine (`exchange.layout`). A token goes once to each of its experts, and each
answers with a row. The attention die weighs and sums the rows in top-k order, so no bit depends on which die
has which expert. An immediate (32 bits) is   event, lower 16 bits | rows, 16 bits.

One block for each pair is enough. An attention die sends its next tokens when it has the answers of all
expert dies, so each of them has finished with the tokens before. An expert die sends its next answers when it
has the next tokens of all attention dies, so each of them has taken the answers before.
"""

from __future__ import annotations

import msgspec

from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan

LOW = 0xFFFF
STREAM_WORD = 8  # bytes


class M2NLayout(msgspec.Struct, frozen=True):
    """Layout of M2N: attention and expert dies, and all sizes. Both sides must use equal layouts.

    `max_tokens` is an attention die's maximum in an exchange; `name` distinguishes several layouts on one
    die.
    """

    attention: tuple[int, ...]
    experts: Group
    max_tokens: int
    top_k: int
    hidden: int
    quantize: bool = True
    name: str = "m2n"
    int8_answers: bool = False  # of layouts that quantise

    def __post_init__(self) -> None:
        dies = self.attention + self.experts.dies
        if not self.attention or len(set(dies)) != len(dies):
            raise DeploymentError(
                "M2N needs different attention and expert dies, one or more each, not "
                f"{list(self.attention)} and {list(self.experts.dies)}"
            )
        if self.rows.rows_per_block > LOW:
            raise DeploymentError(
                f"M2N: {self.rows.rows_per_block} rows of a pair of dies do not fit in the {LOW} that an "
                "immediate can tell"
            )

    @property
    def rows(self) -> Layout:
        """Layout of the rows of tokens and answers, which also checks the sizes."""
        most = self.experts.max_experts_per_rank
        sizes = len(self.attention), self.max_tokens, self.top_k, self.hidden, most
        return Layout(*sizes, self.quantize, self.name, self.int8_answers)

    def region(self, part: str) -> str:
        """Return the name of a region: tokens.out, tokens.in, answers.out, answers.in or stream."""
        return f"{self.name}.{part}"

    def plan_attention(self, memory: MemoryPlan) -> None:
        """Reserve an attention die's regions."""
        rows = self.rows
        memory.managed.alloc(self.region("tokens.out"), self.max_tokens * self.top_k * rows.dispatch_row)
        memory.managed.alloc(self.region("answers.in"), self.experts.num_ranks * rows.combine_block)
        memory.metadata.alloc(self.region("stream"), 2 * STREAM_WORD)

    def plan_expert(self, memory: MemoryPlan) -> None:
        """Reserve an expert die's regions."""
        rows, num_attention = self.rows, len(self.attention)
        memory.managed.alloc(self.region("tokens.in"), num_attention * rows.dispatch_block)
        memory.managed.alloc(self.region("answers.out"), num_attention * rows.combine_block)
        memory.metadata.alloc(self.region("stream"), 2 * STREAM_WORD)


def immediate(event_id: int, num_rows: int) -> int:
    """Pack event and number of rows into a write's immediate (32 bits)."""
    return (event_id & LOW) << 16 | num_rows


def told(value: int) -> tuple[int, int]:
    """Unpack an immediate: the lower 16 bits of the event, and the number of rows."""
    return value >> 16, value & LOW
