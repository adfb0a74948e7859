"""A layer of CloudMatrix's prefill in closed form (CM 4.3), and the gain of its two microbatches.

Stages and their prices are those of the Program that every run walks. Attention is not absorbed, as in runs
with `prefill_attention=unabsorbed`. A prompt's keys and values are made once, for all heads, so that each
position costs a head N + R + V products and not 2 C + R. The costs of vector work, collectives and launches
are not published; a single number stands for them. It is the share of the layer's time that its stages alone
would take, fitted to the one throughput of Table 2 with even experts. The time of a layer without
microbatches follows from it.
"""

from __future__ import annotations

import msgspec

from xdeepserve.bench.papers.decode_formula import expert_layer
from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL, OPS
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import CommCost
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.step.frame import Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.stage import Counts, stages

CHIP_TOKENS, PROMPT = 16384, 4096  # CM Table 2
PROMPTS = (1024, 2048, 4096, 8192)
EP = 32  # dies of a prefill instance (CM 4.1)
EFFICIENCY = Param(
    0.556, "ratio", "fitted: CM Table 2, perfect EPLB: a layer's stages over its time with two microbatches"
)


class PrefillCost(msgspec.Struct, frozen=True):
    """Cost of prefill for a model, on dies with `CHIP_TOKENS` / 2 tokens each, of prompts of `prompt` tokens.

    Without `hides` two microbatches go one after the other.
    """

    config: ModelConfig
    efficiency: float = EFFICIENCY.value
    unabsorbed: bool = True
    comm: CommCost = CommCost()
    spec: Spec = Spec()
    prompt: int = PROMPT
    hides: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens on a die."""
        return CHIP_TOKENS // DIES_PER_CHIP

    def compute_ns(self) -> float:
        """Compute the time of all stages of a layer with experts [ns], at their own efficiencies."""
        c, layer, tokens = self.config, expert_layer(self.config), self.tokens
        copies = tokens * c.num_experts_per_tok
        counts = Counts(tokens, tokens * self.prompt / 2, tokens, copies, c.n_routed_experts / EP)
        program = decoder_layer(layer, Where("among"))
        model = Model(c, "int8", c.num_attention_heads, self.unabsorbed)
        works = [stage.work(model, layer, counts) for stage in stages((*program.attention, *program.feed))]
        return sum(map(self.spec.stage_ns, works))

    def exchanges_ns(self) -> float:
        """Compute the time of dispatch and combine [ns]."""
        copies = self.config.num_experts_per_tok
        return sum(self.comm.exchange_ns(op, EP, self.tokens, copies) for op in OPS)

    def layer_ns(self, microbatches: bool = True) -> float:
        """Compute a layer [ns]. Two microbatches hide the shorter of computing and exchanging behind the
        other (CM 4.3.2)."""
        parts = self.compute_ns() / self.efficiency, self.exchanges_ns()
        return max(parts) if microbatches and self.hides else sum(parts)

    def batch_ns(self, microbatches: bool = True) -> float:
        """Compute the time [ns] from a chip's prompt tokens to the first new ones."""
        return self.config.num_hidden_layers * self.layer_ns(microbatches)

    def throughput(self, microbatches: bool = True) -> float:
        """Compute the prompt tokens per second of a chip."""
        return CHIP_TOKENS / self.batch_ns(microbatches) * 1e9


def rows(cost: PrefillCost | None = None) -> list[Row]:
    """Compute CM Table 2 with even experts, and the gain of microbatches (5.4.1, Figure 21)."""
    cost = cost or PrefillCost(resolve_model(MODEL).config)
    gain = cost.layer_ns(microbatches=False) / cost.layer_ns()
    return [
        Row("cm.t2/perfect EPLB", cost.throughput(), "tok/s", "calibrated"),
        Row("cm.mb.prefill", gain, "x", "predicted"),
        Row("cm.mb.prefill.layer", 100 * (1 - 1 / gain), "%", "predicted"),
    ]


def by_length() -> list[Row]:
    """Compute throughput by the length of prompts, with two microbatches and with one (CM Figure 21a)."""
    costs = [PrefillCost(resolve_model(MODEL).config, prompt=prompt) for prompt in PROMPTS]
    return [
        Row(f"prefill/{way}/prompt={cost.prompt}", cost.throughput(way == "two"), "tok/s", "predicted")
        for way in ("two", "one")
        for cost in costs
    ]
