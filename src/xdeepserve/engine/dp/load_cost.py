"""Load cached blocks from the host's memory, or compute their tokens again? (DeepServe 4.3)"""

from __future__ import annotations

from xdeepserve.hw.spec import Spec, Work


class BlockLoadCost:
    """Compares the time to load cached KV blocks from host DRAM with the time to recompute their tokens."""

    def __init__(self, spec: Spec, block_nbytes: int, weight_nbytes: int, is_always: bool) -> None:
        self._spec, self._block_nbytes, self._is_always = spec, block_nbytes, is_always
        self._ops_per_token = 2.0 * weight_nbytes  # every weight byte at most once

    def should_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether `num_blocks` arrive sooner than `num_tokens` are computed; always True with `is_always`."""
        if self._is_always:
            return True
        spec = self._spec
        load_ns = spec.startup_ns("dma") + spec.link_ns(0, num_blocks * self._block_nbytes, 0)
        return load_ns < spec.stage_ns(Work(int8=num_tokens * self._ops_per_token))
