"""FusedCombine: answers are pushed to the tokens' ranks, which sum them, in three steps (CM 4.2.1)."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.checks import check_array
from xdeepserve.comm.exchange.rows import weighted_sum
from xdeepserve.comm.fused.dispatch import FusedReceived
from xdeepserve.comm.fused.layout import TOKEN_FLAG
from xdeepserve.comm.fused.place import FusedPlace
from xdeepserve.comm.handle import Float32, Handle
from xdeepserve.errors import AddressError, ProtocolError
from xdeepserve.hw.clock import Waiting

# The token flags of FusedCombine: which tokens have all their experts' answers (CM 4.2.1).


class Contributions:
    """Interprets a rank's token flags, without bytes or time.

        bits of a flag              token
        some of the K missing       open
        all K                       complete, and so it stays
        a bit gone, or a K+1st      ProtocolError: an expert answered twice, or for no key

    `ranks_of` is int [T, K]: which rank answers for a token's key.
    """

    def __init__(self, rank: int, ranks_of: npt.NDArray[np.int64]) -> None:
        self.rank, self.ranks_of = rank, ranks_of
        num_tokens, self.top_k = ranks_of.shape
        self.full = (1 << self.top_k) - 1
        self.flags = [0] * num_tokens
        self.num_open = num_tokens

    def look(self, token: int, flag: int) -> None:
        """Take note of a token's flag. Raises ProtocolError if a key was answered twice."""
        before = self.flags[token]
        # Adding a bit that is set already clears it, with a carry.
        if before & ~flag or flag > self.full:
            raise ProtocolError(
                f"fused combine: rank {self.rank}: token {token} was answered for the same key twice: "
                f"its flag went from {before:#b} to {flag:#b}"
            )
        self.flags[token] = flag
        if before < self.full == flag:
            self.num_open -= 1

    @property
    def is_complete(self) -> bool:
        return self.num_open == 0

    @property
    def open_tokens(self) -> list[int]:
        return [token for token, flag in enumerate(self.flags) if flag < self.full]

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks with an answer still missing for some key."""
        return tuple(
            sorted(
                {
                    int(rank)
                    for flag, ranks in zip(self.flags, self.ranks_of, strict=True)
                    for key, rank in enumerate(ranks)
                    if not flag >> key & 1
                }
            )
        )


async def fused_combine(
    handle: Handle,
    place: FusedPlace,
    received: FusedReceived,
    topk_idx: npt.NDArray[np.int32],
    expert_out: Float32,
    topk_weights: Float32,
    shared: Float32 | None,
) -> Float32:
    """FusedCombine on a rank: push answers [N, H] to their tokens' ranks; sum by topk_weights [T, K].

    `received` and `topk_idx` are of the dispatch before.
    """
    die, layout, spec, op = handle.die, place.layout, handle.die.spec, place.titles.combine
    num_tokens, top_k = topk_idx.shape
    await die.clock.sleep(spec.kernel_ns(0, 0))

    # Step 1: the cores loop over the peers and their received tokens, in the pipeline of FusedDispatch: load
    # an answer, compute its address at the origin from what the token brought along, write it AIV-direct.
    # No quantisation on the way back, unless the layout says so: answers of the int8 recipe are bfloat16.
    by_source = np.argsort(received.source_rank, kind="stable")
    messages = layout.answers.pack(expert_out, layout.combine_message, handle.quantize)
    raw, size = memoryview(messages.tobytes()), layout.combine_message
    origins = list(
        zip(
            received.source_rank[by_source].tolist(),
            received.batch_slot[by_source].tolist(),
            received.key_offset[by_source].tolist(),
            strict=True,
        )
    )
    pieces = [
        (place.answer_address(*origin), raw[row * size : (row + 1) * size])
        for row, origin in zip(by_source.tolist(), origins, strict=True)
    ]
    operations = max(1, layout.answers.work[1]) * expert_out.size
    if pieces:
        await die.mte.push(
            pieces,
            load_nbytes=expert_out.nbytes,
            work_ns=spec.kernel_ns(operations, 0, core="aiv", cores=handle.num_cores, is_fused=True),
            num_steps=len(pieces),
            cores=handle.num_cores,
            name=f"{op} 1 push",
            copies=place.crossing(np.bincount(received.source_rank, minlength=place.group.num_ranks)),
        )
    await handle.steps.passed(op, 1)

    # Step 2: for each token, add the key's bit to its flag at the origin: atomic, since other ranks add as
    # well.
    if origins:
        flags = {peer: place.region("token_flags", die).address for peer, die in enumerate(place.group.dies)}
        bits = [
            (flags[source].plus(layout.token_flag_offset(slot)), 1 << key) for source, slot, key in origins
        ]
        await die.mte.atomic_add(bits, handle.num_cores, name=f"{op} 2 flags")
    await handle.steps.passed(op, 2)

    # Step 3: wait until the own tokens' flags count all their experts; gather, scale and sum.
    await _wait_for_answers(place, topk_idx, handle.means.timeout_ns)
    place.clear_token_flags()
    flops, nbytes = (num_tokens * top_k * each for each in (2 * layout.hidden, layout.combine_message))
    result = await handle.work(f"{op} 3 sum", partial(_sum, place, topk_weights, shared), flops, nbytes)
    await handle.steps.passed(op, 3)
    return result


async def _wait_for_answers(place: FusedPlace, topk_idx: npt.NDArray[np.int32], timeout_ns: int) -> None:
    die, region = place.die, place.region("token_flags")
    answers = Contributions(place.rank, place.expert_rank[topk_idx])
    num_tokens = len(topk_idx)
    nbytes = place.layout.token_flag_offset(num_tokens)
    flags = np.frombuffer(die.memory.read(region.offset, nbytes), TOKEN_FLAG)
    is_first = True

    def observe(offset: int, _: int) -> bool:
        nonlocal is_first
        if is_first:
            for token, flag in enumerate(flags.tolist()):
                answers.look(token, flag)
            is_first = False
        else:
            token = place.layout.token_at(offset - region.offset)  # one write is one addition
            answers.look(token, int(flags[token]))
        return answers.is_complete

    def describe() -> Waiting:
        seen = {token: f"{answers.flags[token]:#b}" for token in answers.open_tokens[:8]}
        expected = f"{answers.full:#b}"
        return Waiting(place.titles.combine, place.rank, answers.awaited, "token flag", expected, seen)

    deadline_ns = die.clock.now + timeout_ns
    await die.wait_fields(region.offset, nbytes, observe, deadline_ns=deadline_ns, describe=describe)


def _sum(place: FusedPlace, topk_weights: Float32, shared: Float32 | None) -> Float32:
    """Sum the answers in the combine buffer by weight, then add the shared expert's output: float32 [T,
    H]."""
    layout, memory = place.layout, place.die.memory
    num_tokens, top_k = topk_weights.shape
    messages = memory.view(place.region("combine"), np.uint8, (num_tokens * top_k, layout.combine_message))
    answers = layout.answers.unpack(messages)
    result = memory.view(place.region("combined"), np.float32, (num_tokens, layout.hidden))
    # Keys in order, then the shared expert.
    result[:] = weighted_sum(answers.reshape(num_tokens, top_k, layout.hidden), topk_weights)
    if shared is not None:
        result += shared
    return result


def check_answers(
    place: FusedPlace,
    num_received: int,
    shape: tuple[int, ...],
    expert_out: Float32,
    topk_weights: Float32,
    shared: Float32 | None,
) -> None:
    """Check the answers: expert_out [N, H] must match the received rows, and the other arrays `shape` [T, K].
    Raises AddressError if not."""
    op, hidden = place.titles.combine, place.layout.hidden
    _check(op, "expert_out", expert_out, (num_received, hidden))
    _check(op, "topk_weights", topk_weights, shape)
    if shared is not None:
        _check(op, "shared", shared, (shape[0], hidden))


def _check(op: str, name: str, x: Float32, shape: tuple[int, ...]) -> None:
    check_array(op, name, x)
    if x.dtype != np.float32 or x.shape != shape or not x.flags.c_contiguous:
        raise AddressError(f"{op}: {name} must be contiguous float32 {shape}, not {x.dtype} {x.shape}")
