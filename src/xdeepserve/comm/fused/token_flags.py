"""The token flags of FusedCombine: which tokens have all their experts' answers (CM 4.2.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.errors import ProtocolError


class Contributions:
    """What looks at a rank's token flags mean. No bytes, no time.

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
        """Take note of a token's flag."""
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
        """Ranks that have not answered for some key."""
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
