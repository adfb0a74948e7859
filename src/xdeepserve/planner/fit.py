"""How long attention, experts and exchanges take: profiles by rows, from which k1 to k4 and Util follow.

Nothing here is typed in. A pod's profile is read off timing-only runs of one decode step, of the model's own
dense layers and one with experts, at the batches of ROWS. What cannot be run here, BF16 on devices of other
makes, is priced launch by launch by the one table that every run is billed from (`Spec.stage_ns`), with
efficiencies that are assumed there: nobody has timed that, and a plan that uses it has to say so.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.run.clock.routing import TimingConfig
from xdeepserve.engine.run.clock.trampoline_hub import way_back_ns
from xdeepserve.hw.accelerators import Accelerator
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.weights import Part, select, weight_specs
from xdeepserve.planner.decode_run import DecodeRun, decode_iteration
from xdeepserve.planner.moe_shape import MoEShape, require_mla
from xdeepserve.planner.performance import Curve
from xdeepserve.planner.search import NodeKind
from xdeepserve.step.attention import KV_NBYTES

# Rows of a DP group's step; more is outside of what was measured. Few rows leave experts of a die untouched,
# whose weights are then not read: there the points have to be dense.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
AWAY_ROWS = (16, 64, 256)  # of an attention die; an exchange is nearly a line
EXPERT_ROWS = 8  # of an expert die meanwhile: enough for each of its experts to have some
NODE_ROWS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of a node that is priced
MESSAGES = tuple(float(1 << i) for i in range(10, 25, 2))  # bytes
TP = (1, 2, 4, 8)
SAMPLE = 2  # dies that stand for all of a colocated group
LEAST_TOKENS = 32  # of a step, so that prompts get on beside few requests
BLOCK = 16  # positions of a KV block
ATTENTION = ("MLAProlog", "MLA", "OProj")
USABLE = 0.9  # of a die's memory, for weights and KV; the rest is assumed to be enough for activations


# ---- devices that are priced, not run -----------------------------------------------------------------


def message_curve(device: Accelerator) -> Curve:
    """A message by size through a device's card: startup, then bytes, as of `hw/nic.Cards`."""
    startup, rate = device.spec.roce_startup.value, device.network.value
    return Curve(MESSAGES, tuple(1e9 * (startup + size / rate) for size in MESSAGES))


def attention_sides(shape: MoEShape, device: Accelerator, context: float) -> tuple[NodeKind, ...]:
    """Attention nodes of each size, with what tensor parallelism's two reductions take (MS 4.2)."""
    sides, capacity = [], device.spec.hbm_bytes.value
    for tp in TP:
        times = []
        for b in NODE_ROWS:
            reduced = 2 * 2 * b * shape.hidden * 2 * (tp - 1) / tp
            own = sum(map(device.spec.stage_ns, shape.attention_works(b, context, tp)))
            times.append(own + 1e9 * reduced / device.tp_link.value)
        room = shape.kv_cut(tp) * capacity - shape.attention_nbytes() * shape.kv_cut(tp) / tp
        sides.append(
            NodeKind(
                tp=tp,
                time=Curve(NODE_ROWS, tuple(times)),
                message=message_curve(device),
                price=tp * device.price.value,
                fits=room > 0,
                max_positions=room / (shape.kv_nbytes() * shape.layers),
            )
        )
    return tuple(sides)


def expert_sides(shape: MoEShape, device: Accelerator) -> tuple[NodeKind, ...]:
    """Expert nodes of each size, an expert on each."""
    sides = []
    for tp in TP:
        reduced = [2 * b * shape.hidden * 2 * (tp - 1) / tp / device.tp_link.value for b in NODE_ROWS]
        times = [sum(map(device.spec.stage_ns, shape.expert_works(b, tp))) for b in NODE_ROWS]
        sides.append(
            NodeKind(
                tp=tp,
                time=Curve(NODE_ROWS, tuple(t + 1e9 * r for t, r in zip(times, reduced, strict=True))),
                message=message_curve(device),
                price=tp * device.price.value,
                fits=shape.expert_nbytes() < tp * device.spec.hbm_bytes.value,
            )
        )
    return tuple(sides)


# ---- pods, by timing-only runs ------------------------------------------------------------------------


class Demand(msgspec.Struct, frozen=True):
    """What a request brings, in tokens. By default the medians of MS 7.1."""

    prompt: int = 571
    output: int = 159

    @property
    def context(self) -> int:
        """Positions that a request attends to, on average while it decodes."""
        return self.prompt + self.output // 2

    @property
    def max_len(self) -> int:
        return self.prompt + self.output

    @staticmethod
    def at(context: int, max_len: int) -> Demand:
        """A demand with this mean context and greatest length."""
        output = 2 * (max_len - context)
        return Demand(max_len - output, output)


def decode_settings(kind: str, demand: Demand, requests: int, parts: int = 1, **sizes: Any) -> dict[str, Any]:
    """Settings of a deployment in which a DP group decodes `requests` in each of `parts` microbatches."""
    batch = requests * parts
    limits = {"max_num_seqs": batch, "max_num_batched_tokens": max(batch, LEAST_TOKENS)}
    cache = {"block_size": BLOCK, "num_blocks": batch * -(-demand.max_len // BLOCK)}
    return {"kind": kind, "max_model_len": demand.max_len, **sizes, "scheduler": limits, "cache": cache}


def decode_deployment(kind: str, demand: Demand, requests: int, parts: int = 1, **sizes: Any) -> Deployment:
    """A deployment of `decode_settings`."""
    return msgspec.convert(
        {"name": "plan"} | decode_settings(kind, demand, requests, parts, **sizes), Deployment
    )


class PodProfile:
    """Times of one model's stages on CloudMatrix384 dies, under one demand. Runs are made when they are asked
    for, and remembered."""

    def __init__(self, checkpoint: Checkpoint, demand: Demand) -> None:
        self.checkpoint, self.demand, self.config = checkpoint, demand, checkpoint.config
        c = self.config
        require_mla(c)
        self.num_moe = c.num_moe_layers
        self.num_dense = c.num_hidden_layers - self.num_moe
        self.has_shared = c.n_shared_experts > 0
        self.stages = functools.cache(self._stages)
        self.away = functools.cache(self._away)
        self.prefill_rate = functools.cache(self._prefill_rate)

    def run(self, deployment: Deployment, requests: int, timing: TimingConfig) -> DecodeRun:
        """A step of the dense layers and one with experts."""
        shallow = copy.copy(self.checkpoint)
        layers = {"num_hidden_layers": self.num_dense + 1, "first_k_dense_replace": self.num_dense}
        shallow.config = msgspec.structs.replace(self.config, **layers, other_dense_layers=frozenset())
        return decode_iteration(shallow, deployment, self.demand.context, requests, timing)

    def _stages(self, num_dies: int) -> dict[str, Curve]:
        """Each stage of a layer by rows of a die, on `num_dies` that hold all experts between them."""
        runs = []
        for rows in ROWS:
            sizes = {} if num_dies == 1 else {"dies": min(SAMPLE, num_dies)}
            kind = "colocated" if sizes else "monolithic"
            timing = TimingConfig(of_dies=num_dies, routed_dies=num_dies)
            runs.append(self.run(decode_deployment(kind, self.demand, rows, **sizes), rows, timing).spent_ns)
        counts = dict.fromkeys(ATTENTION, self.num_dense + 1) | {"MLP": max(1, self.num_dense)}
        names = {name for spent in runs for name in spent}
        return {
            name: Curve(ROWS, tuple(spent.get(name, 0.0) / counts.get(name, 1) for spent in runs))
            for name in sorted(names)
        }

    def attention(self, num_dies: int, rows: float) -> float:
        stages = self.stages(num_dies)
        return sum(stages[name](rows) for name in ATTENTION)

    def other(self, num_dies: int, name: str, rows: float) -> float:
        """A stage that not every model or layout has."""
        curve = self.stages(num_dies).get(name)
        return curve(rows) if curve else 0.0

    def ends(self, num_dies: int, rows: float, parts: int = 1) -> float:
        """What is no layer with experts: the dense ones, each part after the other, and the head."""
        dense = self.attention(num_dies, rows) + self.other(num_dies, "MLP", rows)
        return self.num_dense * parts * dense + self.other(num_dies, "Sample", rows)

    def _away(self, routed: int, shared: int) -> tuple[Curve, Curve]:
        """By rows of an attention die: posting them to the expert dies, and one exchange among those.

        With one microbatch, E2A lasts two exchanges, the experts' time, and the way back from a trampoline.
        How many attention dies there are makes little difference to an exchange.
        """
        posts, exchanges = [], []
        for rows in AWAY_ROWS:
            dies = -(-EXPERT_ROWS * routed // rows)
            deployment = decode_deployment(
                "moe-attention",
                self.demand,
                rows,
                attention={"domains": 1, "dies": dies, "microbatches": 1},
                experts={"routed_dies": routed, "shared_dies": shared},
            )
            spent = self.run(deployment, rows, TimingConfig()).spent_ns
            posts.append(spent["A2E"])
            exchanges.append(spent["E2A"] - self.experts(routed, shared, rows * dies))
        ways = ((ns - self.back(rows, shared)) / 2 for rows, ns in zip(AWAY_ROWS, exchanges, strict=True))
        return Curve(AWAY_ROWS, tuple(posts)), Curve(AWAY_ROWS, tuple(ways))

    def experts(self, routed: int, shared: int, rows: float) -> float:
        """T_e of expert dies that `rows` tokens come to in all: of routed dies, or of shared ones."""
        copies = self.other(routed, "Experts", rows / routed)
        return max(copies, self.other(routed, "SharedExpert", rows / shared) if shared else 0.0)

    def back(self, rows: float, shared: int) -> float:
        """From a trampoline to its attention die: sums of the answers of `rows`."""
        return way_back_ns(self.config, rows, has_shared=shared > 0)

    def weight_nbytes(self, part: Part, num_dies: int) -> int:
        """Bytes of weights on a die, one of `num_dies` that share the routed experts."""
        held = -(-self.config.n_routed_experts // num_dies) if part in ("all", "routed") else 1
        specs = weight_specs(self.config, "int8", self.demand.max_len, held, 0)
        return sum(spec.nbytes for spec in select(specs, part).values())

    def kv_nbytes(self) -> int:
        """Bytes of a request of full length."""
        c = self.config
        width = KV_NBYTES * c.kv_columns
        return -(-self.demand.max_len // BLOCK) * BLOCK * width * c.num_hidden_layers

    def _prefill_rate(self, num_dies: int) -> float:
        """Prompt tokens per second of a prefill TE, two prompts in each of its DP groups."""
        from xdeepserve.engine.dp.sampling_params import SamplingParams
        from xdeepserve.llm import LLM

        prefill = {"dies": num_dies, "max_num_batched_tokens": 2 * self.demand.prompt}
        deployment = decode_deployment("pd", self.demand, 16, prefill=prefill, decode={"dies": SAMPLE})
        with LLM(self.checkpoint, deployment, timing_only=True) as llm:
            groups = len(llm.engine.je.tes[0].groups)
            prompts = [[5] * self.demand.prompt] * (2 * groups)
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        last = max(out.metrics.ttft_ns or 0 for out in outputs if out.metrics is not None)
        return 2 * groups * self.demand.prompt / last * 1e9


def usable_nbytes(hbm_bytes: float) -> int:
    return math.floor(USABLE * hbm_bytes)
