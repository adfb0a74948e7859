"""Offsets and sizes of FusedDispatch and FusedCombine: flags, messages, preallocated buffers (CM 4.2.1).

On each rank, for R ranks, a batch of at most B tokens, K experts a token, E experts on a rank:

    metadata   dispatch flags [2][R]    one field a peer, in two sets, written by that peer
               token flags [B]          one u32 a token: bit k is key k's answer, added by the expert's rank
    managed    dispatch buffer          R blocks of max_tokens messages; block r is written by rank r
               combine buffer           message (batch slot, key) at index slot * K + key
    app        output                   the received tokens, contiguous; and the combined tokens

    max_tokens  = B * min(K, E)                         equation (2)
    buffer size = R * max_tokens * message size         equation (1), for each of the two buffers

With K different experts a token, K <= R * E, so R * max_tokens >= B * K: the combine buffer holds them all.

A dispatch message:   payload, padded to 512 | a slot of 512 bytes
    The payload is H int8 (quantised) or H float32. The slot starts with
    scale f32 | source rank i32 | batch slot i32 | key offset i32 | expert i32 (physical).
    At H = 7168, INT8: 7168 + 512 = 7680 bytes, the paper's 7.5 KB.
A combine message:    H bfloat16 (quantised) or H float32, padded to 512. At H = 7168: the paper's 14 KB.
    With `int8_answers` scale f32 | H int8 (xDeepServe 4.7; see `exchange.answers`).
A dispatch flag:      event ID u64 | token count u32 for each of the reader's E experts, padded to 32 bytes.

A token flag:         complete when its K bits are set. (The paper's rank adds 1 to it for each answer. Ours
adds
    2 ** key, which tells just as well when all are there, and besides which is missing or came twice.)

Why messages and flags of successive operations do not meet. FusedDispatch is a barrier: it ends when all
flags are there. FusedCombine is not: a rank waits only for those that hold experts of its tokens.
  - Dispatch flags need two sets, used in turn. A rank that sent nothing to a slow one may finish C(n) and
    post D(n+1) while the slow one still polls for the flags of D(n). It cannot reach D(n+2), since D(n+1)
    waits for the slow one's flag. (The paper's flags say '1'; ours say the event ID, so that nobody must
    clear them in time.)
  - The dispatch buffer needs one. Whoever has messages in it waits in C(n) for their answers, which come
    after they have been read.
  - The combine buffer and the token flags need one. All contributions to C(n) have arrived, and been read and
    cleared, before the rank dispatches again and thereby invites the next.
  - Dispatch and combine must not share a buffer: a fast rank answers while a slow one still reads (the
    paper's double buffering).
"""

from __future__ import annotations

import msgspec
import numpy as np

from xdeepserve.comm.board import BoardLayout
from xdeepserve.comm.cells import NO_HEADER, Cells, row_dtype
from xdeepserve.comm.checks import check_count
from xdeepserve.comm.exchange.answers import AnswerFormat
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.wire import padded
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan

SLOT_DTYPE = np.dtype(
    [
        ("scale", "<f4"),
        ("source_rank", "<i4"),
        ("batch_slot", "<i4"),
        ("key_offset", "<i4"),
        ("expert_idx", "<i4"),
    ]
)
TOKEN_FLAG = np.dtype("<u4")
MAX_TOP_K = 8 * TOKEN_FLAG.itemsize
MESSAGE_ALIGNMENT = 512


class FusedLayout(msgspec.Struct, frozen=True):
    """Sizes (bytes) of a fused exchange.

    All ranks of a group must use equal layouts; `name` keeps two on one die apart.

    `local_batch` is the most tokens of a rank. A group may have fewer ranks than `num_ranks`: the survivors
    of a failure can go on in the same memory.
    """

    num_ranks: int
    local_batch: int
    top_k: int
    hidden: int
    experts_per_rank: int
    quantize: bool = True
    name: str = "fused"
    int8_answers: bool = False  # of layouts that quantise
    alignment: int = MESSAGE_ALIGNMENT  # of payloads in messages, and the size of a slot

    def __post_init__(self) -> None:
        for field in ("num_ranks", "local_batch", "top_k", "hidden", "experts_per_rank"):
            check_count("fused layout", field, getattr(self, field))
        if self.top_k > MAX_TOP_K:
            raise DeploymentError(f"fused layout: top_k {self.top_k} exceeds the {MAX_TOP_K} bits of a flag")
        if self.top_k > self.num_ranks * self.experts_per_rank:
            raise DeploymentError(
                f"fused layout: top_k {self.top_k} exceeds the {self.num_ranks * self.experts_per_rank} "
                f"experts of {self.num_ranks} ranks"
            )

    @classmethod
    def for_group(
        cls,
        group: Group,
        local_batch: int,
        *,
        top_k: int,
        hidden: int,
        quantize: bool = True,
        name: str = "fused",
        int8_answers: bool = False,
    ) -> FusedLayout:
        """Make the smallest layout for `group`."""
        experts = max(1, group.max_experts_per_rank)
        return cls(group.num_ranks, local_batch, top_k, hidden, experts, quantize, name, int8_answers)

    # ---- messages -----------------------------------------------------------------------------------

    @property
    def dispatch_payload(self) -> np.dtype[np.generic]:
        return np.dtype(np.int8 if self.quantize else np.float32)

    @property
    def answers(self) -> AnswerFormat:
        """Format of combine messages, without their padding."""
        return AnswerFormat.of(self.hidden, self.quantize, self.int8_answers)

    @property
    def combine_payload(self) -> np.dtype[np.generic]:
        """Type of an element in a combine message; bfloat16 is kept as its 16 bits."""
        return self.answers.dtype

    @property
    def slot_offset(self) -> int:
        """Offset of scale and routing in a dispatch message (bytes)."""
        return padded(self.hidden * self.dispatch_payload.itemsize, self.alignment)

    @property
    def dispatch_message(self) -> int:
        return self.slot_offset + self.alignment

    @property
    def combine_message(self) -> int:
        return padded(self.answers.nbytes, self.alignment)

    # ---- buffers ------------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Equation (2): largest number of messages from a rank to a peer."""
        return self.local_batch * min(self.top_k, self.experts_per_rank)

    @property
    def dispatch_buffer(self) -> int:
        """Size of the dispatch buffer (bytes), by equation (1)."""
        return self.num_ranks * self.max_tokens * self.dispatch_message

    @property
    def combine_buffer(self) -> int:
        """Size of the combine buffer (bytes), by equation (1)."""
        return self.num_ranks * self.max_tokens * self.combine_message

    @property
    def capacity(self) -> int:
        """Largest number of tokens received by a rank."""
        return self.num_ranks * self.max_tokens

    def dispatch_offset(self, source: int, index: int) -> int:
        """Return the offset in the dispatch buffer of a source's message number `index`."""
        return (source * self.max_tokens + index) * self.dispatch_message

    def combine_offset(self, batch_slot: int, key_offset: int) -> int:
        """Return the offset in the combine buffer of the answer for a token's key."""
        return (batch_slot * self.top_k + key_offset) * self.combine_message

    # ---- flags --------------------------------------------------------------------------------------

    @property
    def flag_dtype(self) -> np.dtype[np.void]:
        names = ["event_id", "counts"]
        formats = ["<u8", ("<u4", (self.experts_per_rank,))]
        size = padded(8 + 4 * self.experts_per_rank)
        return np.dtype({"names": names, "formats": formats, "itemsize": size})

    @property
    def board(self) -> BoardLayout:
        """Layout of the board of dispatch flags."""
        return BoardLayout(self.flag_dtype, self.num_ranks)

    def token_flag_offset(self, batch_slot: int) -> int:
        """Return the offset of a token's flag among the token flags."""
        return batch_slot * TOKEN_FLAG.itemsize

    def token_at(self, offset: int) -> int:
        """Return the batch slot to whose flag the byte at an offset in the token flags belongs."""
        return offset // TOKEN_FLAG.itemsize

    # ---- regions ------------------------------------------------------------------------------------

    def plan(self, memory: MemoryPlan) -> None:
        """Reserve a rank's regions. Raises OutOfMemoryError if the metadata area cannot take the flags."""
        memory.metadata.alloc(self.region("flags"), self.board.nbytes)
        memory.metadata.alloc(self.region("token_flags"), self.token_flag_offset(self.local_batch))
        memory.managed.alloc(self.region("dispatch"), self.dispatch_buffer, align=MESSAGE_ALIGNMENT)
        memory.managed.alloc(self.region("combine"), self.combine_buffer, align=MESSAGE_ALIGNMENT)
        payload = self.hidden * self.dispatch_payload.itemsize
        memory.app.alloc(self.region("output"), self.capacity * payload)
        memory.app.alloc(self.region("output_slots"), self.capacity * SLOT_DTYPE.itemsize)
        memory.app.alloc(self.region("combined"), self.local_batch * self.hidden * 4)

    def region(self, part: str) -> str:
        """Name of a region: flags, token_flags, dispatch, combine, output, output_slots or combined."""
        return f"{self.name}.{part}"

    def cells(self) -> dict[str, Cells]:
        """Map the regions to their cells: flags, messages, and the tokens gathered from them."""
        ranks, payload, hidden = self.num_ranks, self.dispatch_payload, ("element", self.hidden)
        message = row_dtype(SLOT_DTYPE, payload, self.hidden, self.slot_offset, self.dispatch_message)
        answer = row_dtype(NO_HEADER, self.combine_payload, self.hidden, 0, self.combine_message)
        answers = self.combine_buffer // self.combine_message
        return {
            self.region("flags"): Cells(self.flag_dtype, (("set", 2), ("peer", ranks))),
            self.region("token_flags"): Cells(TOKEN_FLAG, (("token", self.local_batch),)),
            self.region("dispatch"): Cells(message, (("peer", ranks), ("message", self.max_tokens))),
            self.region("combine"): Cells(answer, (("answer", answers),)),
            self.region("output"): Cells(payload, (("row", self.capacity), hidden)),
            self.region("output_slots"): Cells(SLOT_DTYPE, (("row", self.capacity),)),
            self.region("combined"): Cells(np.dtype("<f4"), (("token", self.local_batch), hidden)),
        }
