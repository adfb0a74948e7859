"""Times of a pod's stages and exchanges by rows: measured in timing-only runs, never typed in.

A run is one decode step of the model's own dense layers and one layer with experts, on a few dies that stand
for all. The profiles give k1 to k4 and, for dies joined by network cards, Util.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, Device
from xdeepserve.engine.ways.routing import TimingConfig, busiest
from xdeepserve.engine.ways.trampolines.clock import slower_way, way_back_ns
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.m2n.clock_way import m2n_row_nbytes
from xdeepserve.model.cache_layout import entries_nbytes
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.weights import Part, select, weight_specs
from xdeepserve.prices.curve import Curve, measured, with_blocks
from xdeepserve.prices.step_run import DecodeRun, decode_iteration
from xdeepserve.step.layer import ATTENTION
from xdeepserve.step.passes import EMBED, HEAD
from xdeepserve.step.stage import stages

# Rows of a DP group's step; more is outside of what was measured. Few rows leave experts of a die untouched,
# whose weights are then not read: there the points have to be dense.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
AWAY_ROWS = (16, 64, 256)  # of an attention die; an exchange is nearly a line
EXPERT_ROWS = 8  # of an expert die meanwhile: enough for each of its experts to have some
CARD_ROWS = (1, 256)  # of an attention die, where network cards carry them: a line
CROWD_ROWS, CROWDS = 4, (8, 16)  # rows of each of so many attention dies that send to one expert die
SAMPLE = 2  # dies that stand for all of a group
LEAST_TOKENS = 32  # of a step, so that prompts get on beside few requests
BLOCK = 16  # positions of a KV block
USABLE = 0.9  # of a die's memory, for weights and KV; the rest is assumed to be enough for activations
HERE: tuple[Device, Device] = ("cm384", "cm384")  # attention's and experts' hardware, joined by UB


class Demand(msgspec.Struct, frozen=True):
    """Tokens of a request, on average; by default the medians of MS 7.1.

    `longest` bounds a request's length; 0 means the average.
    """

    prompt: int = 571
    output: int = 159
    longest: int = 0

    @property
    def context(self) -> int:
        """Number of positions attended to by a request, on average while it decodes."""
        return self.prompt + self.output // 2

    @property
    def mean_len(self) -> int:
        """Number of positions of an average request at its end."""
        return self.prompt + self.output

    @property
    def max_len(self) -> int:
        return max(self.longest, self.mean_len)

    @staticmethod
    def at(context: int, max_len: int) -> Demand:
        """Make a demand of a mean context and a greatest length."""
        output = 2 * (max_len - context)
        return Demand(max_len - output, output)

    def num_blocks(self, requests: int) -> int:
        """Return the KV blocks of `requests` average requests at their end, and at least those of the
        longest."""
        return max(requests * -(-self.mean_len // BLOCK), -(-self.max_len // BLOCK))


def decode_settings(kind: str, demand: Demand, requests: int, parts: int = 1, **sizes: Any) -> dict[str, Any]:
    """Return settings of a deployment in which a DP group decodes `requests` in each of `parts`
    microbatches."""
    batch = requests * parts
    limits = {"max_num_seqs": batch, "max_num_batched_tokens": max(batch, LEAST_TOKENS)}
    cache = {"block_size": BLOCK, "num_blocks": demand.num_blocks(batch)}
    return {"kind": kind, "max_model_len": demand.max_len, **sizes, "scheduler": limits, "cache": cache}


def decode_deployment(kind: str, demand: Demand, requests: int, parts: int = 1, **sizes: Any) -> Deployment:
    """Make a deployment of `decode_settings` for timing, with one KV block for each request and no shared
    prefixes."""
    settings = {"name": "plan"} | decode_settings(kind, demand, requests, parts, **sizes)
    block = BLOCK * (demand.max_len // BLOCK + 1)
    return with_blocks(msgspec.convert(settings, Deployment), requests * parts, block)


class Ways(NamedTuple):
    """Exchanges between attention and expert dies, by rows of an attention die.

    post    an attention die is busy with what it sends
    over    from there to the experts, and from them back: 2 T_c, by rows and by token copies of an expert die
    """

    post: Curve
    over: OverTrampolines | OverCards


class OverTrampolines(NamedTuple):
    """Exchange through trampolines: among the expert dies each way, and back in bulk as fast as posting
    goes."""

    exchange: Curve  # the mean of both ways
    slower: Curve  # of both
    back: Curve

    def __call__(self, rows: float, copies: float) -> float:
        return 2 * self.exchange(rows) + self.back(rows)

    def busy(self, rows: float, copies: float) -> float:
        """Return how long a transfer keeps an expert die busy, for the slower of both directions."""
        return self.slower(rows)


class OverCards(NamedTuple):
    """Exchange over network cards (MS equation 6): the slower of sender and receiver sets the time.

    near   ns for a row of an attention die's card, far for a copy of an expert die's; `answers` times as much
           on the way back
    fixed  the remaining time, independent of rows
    """

    near: float
    far: float
    answers: float
    fixed: float

    def __call__(self, rows: float, copies: float) -> float:
        late = max(0.0, self.far * copies - self.near * rows)
        return self.fixed + late + self.answers * max(self.near * rows, self.far * copies)

    def busy(self, rows: float, copies: float) -> float:
        """Return how long sending answers keeps an expert die busy."""
        return self.fixed + self.answers * max(self.near * rows, self.far * copies)


class PodProfile:
    """Times of a model's stages under a demand, on dies of a kind (CloudMatrix384's by default).

    Runs are made when they are needed, and remembered. `name` is the model's name in error messages.
    """

    def __init__(self, checkpoint: Checkpoint, demand: Demand, name: str | None = None) -> None:
        self.name = name or checkpoint.name
        self.checkpoint, self.demand, self.config = checkpoint, demand, checkpoint.config
        c = self.config
        if not any(c.is_moe(i) for i in range(c.num_hidden_layers)):
            raise DeploymentError(f"plan is about experts, and no layer of model {self.name} has some")
        self.num_moe = c.num_moe_layers
        self.num_dense = c.num_hidden_layers - self.num_moe
        self.has_shared = c.n_shared_experts > 0
        self.names = tuple(stage.name for stage in stages(ATTENTION[c.attention]))
        self.stages = functools.cache(self._stages)
        self.away = functools.cache(self._away)
        self.by_cards = functools.cache(self._by_cards)
        self.weight_nbytes = functools.cache(self._weight_nbytes)
        self.prefill_rate = functools.cache(self._prefill_rate)

    def run(
        self,
        deployment: Deployment,
        requests: int,
        timing: TimingConfig,
        device: Device = "cm384",
        shared: frozenset[int] = frozenset(),
    ) -> DecodeRun:
        """Run a step of the dense layers and one layer with experts, on dies of `device`. Each layer has an
        indexer of its own, if the model has some, except layers in `shared`."""
        shallow = self._shallow(1, shared)
        spec = ACCELERATORS[device].spec
        return decode_iteration(shallow, deployment, self.demand.context, requests, timing, spec=spec)

    def _shallow(self, num_moe: int, shared: frozenset[int] = frozenset()) -> Checkpoint:
        """Make the model with all dense layers and `num_moe` layers with experts."""
        shallow = copy.copy(self.checkpoint)
        layers = {
            "num_hidden_layers": self.num_dense + num_moe,
            "first_k_dense_replace": self.num_dense,
            "other_dense_layers": frozenset(),
            "shared_choices": shared,
        }
        shallow.config = msgspec.structs.replace(self.config, **layers)
        return shallow

    def _stages(self, num_dies: int, device: Device = "cm384") -> dict[str, Curve]:
        """Measure each stage of a layer by rows of a die, on `num_dies` dies that hold all experts
        together."""
        kind, sizes = ("monolithic", {}) if num_dies == 1 else ("colocated", {"dies": min(SAMPLE, num_dies)})
        timing = TimingConfig(of_dies=num_dies, routed_dies=num_dies)

        def spent(rows: int) -> dict[str, float]:
            deployment = decode_deployment(kind, self.demand, rows, **sizes)
            return self._spent(deployment, rows, timing, device)

        runs = measured(ROWS, spent)
        counts = dict.fromkeys(self.names, self.num_dense + 1) | {"MLP": max(1, self.num_dense)}
        names = sorted({name for each in runs.values() for name in each})
        return {
            name: Curve(ROWS, tuple(each.get(name, 0.0) / counts.get(name, 1) for each in runs.values()))
            for name in names
        }

    def _spent(
        self, deployment: Deployment, requests: int, timing: TimingConfig, device: Device
    ) -> dict[str, float]:
        """Measure the total times of stages. Layers that share a choice of positions are weighted by their
        share in the whole model."""
        spent = self.run(deployment, requests, timing, device).spent_ns
        if not (num_shared := len(self.config.shared_choices)) or not self.num_dense:
            return spent
        with_shared = self.run(deployment, requests, timing, device, frozenset({self.num_dense})).spent_ns
        part = (self.num_dense + 1) * num_shared / self.config.num_hidden_layers
        return spent | {name: spent[name] + part * (with_shared[name] - spent[name]) for name in self.names}

    def attention(self, num_dies: int, rows: float, device: Device = "cm384") -> float:
        stages = self.stages(num_dies, device)
        return sum(stages[name](rows) for name in self.names)

    def other(self, num_dies: int, name: str, rows: float, device: Device = "cm384") -> float:
        """Return the time of a stage that only some models or layouts have; 0 without it."""
        curve = self.stages(num_dies, device).get(name)
        return curve(rows) if curve else 0.0

    def ends(self, num_dies: int, rows: float, parts: int = 1, device: Device = "cm384") -> float:
        """Return the time outside of layers with experts: dense layers, each microbatch after the other,
        embedding and head."""
        dense = self.attention(num_dies, rows, device) + self.other(num_dies, "MLP", rows, device)
        around = sum(self.other(num_dies, stage.name, parts * rows, device) for stage in stages(EMBED + HEAD))
        return self.num_dense * parts * dense + around

    def experts(self, routed: int, shared: int, rows: float, device: Device = "cm384") -> float:
        """Return T_e of expert dies for `rows` tokens in all: the slower of routed dies and shared dies."""
        copies = self.other(routed, "Experts", rows / routed, device)
        alone = self.other(routed, "SharedExpert", rows / shared, device) if shared else 0.0
        return max(copies, alone)

    def copies(self, routed: int, shared: int, rows: float) -> float:
        """Return the token copies at the busiest die, of `rows` tokens in all: by chance a few standard
        deviations above its share."""
        most = busiest(routed, rows * self.config.num_experts_per_tok)
        return max(most, rows / shared if shared else 0.0)

    def _away(self, routed: int, shared: int, devices: tuple[Device, Device] = HERE) -> Ways:
        """Measure the ways between attention dies and expert dies; a few dies stand for all."""
        if devices != HERE:
            return self.by_cards(shared > 0, devices)
        c, has_shared, sample = self.config, shared > 0, min(SAMPLE, routed)
        back = Curve.of(AWAY_ROWS, lambda rows: way_back_ns(c, rows, has_shared=has_shared))

        def exchange(rows: int) -> tuple[float, float]:
            return self._exchange(rows, -(-EXPERT_ROWS * sample // rows), routed, shared, devices)

        def way(rows: int) -> float:
            return (runs[rows][1] - back(rows)) / 2

        def slower(rows: int) -> float:
            return way(rows) * slower_way(c, routed + shared, rows, has_shared=has_shared)

        runs = measured(AWAY_ROWS, exchange)
        post = Curve.of(AWAY_ROWS, lambda rows: runs[rows][0])
        return Ways(post, OverTrampolines(Curve.of(AWAY_ROWS, way), Curve.of(AWAY_ROWS, slower), back))

    def _by_cards(self, has_shared: bool, devices: tuple[Device, Device]) -> Ways:
        """Measure the ways over network cards. Two runs tell the time of an attention die's card for a row.
        In two more, a few dies send to a single expert die, which tells the time of its card for a copy."""
        sizes = 1, int(has_shared), devices
        posts = [self._exchange(rows, 1, *sizes)[0] for rows in CARD_ROWS]
        near = (posts[1] - posts[0]) / (CARD_ROWS[1] - CARD_ROWS[0])
        token, answer = m2n_row_nbytes(self.config)
        answers = answer / token
        rests = [self._exchange(CROWD_ROWS, dies, *sizes)[1] for dies in CROWDS]
        copies = [self.copies(1, 0, CROWD_ROWS * dies) for dies in CROWDS]
        far = max(0.0, (rests[1] - rests[0]) / (copies[1] - copies[0]) / (1 + answers))
        way = OverCards(near, far, answers, 0.0)
        fixed = max(0.0, rests[1] - way(CROWD_ROWS, copies[1]))
        return Ways(Curve(CARD_ROWS, tuple(posts)), way._replace(fixed=fixed))

    def _exchange(
        self, rows: int, dies: int, routed: int, shared: int, devices: tuple[Device, Device]
    ) -> tuple[float, float]:
        """Measure an attention die's time to send `rows`, and its wait afterwards without the experts' time,
        if `dies` of them share a sample of `routed` expert dies."""
        sample = min(SAMPLE, routed)
        deployment = decode_deployment(
            "moe-attention",
            self.demand,
            rows,
            attention={"domains": 1, "dies": dies, "microbatches": 1, "hardware": devices[0]},
            experts={"routed_dies": sample, "shared_dies": min(1, shared), "hardware": devices[1]},
        )
        timing = TimingConfig(of_dies=routed + shared, routed_dies=routed)
        run = self.run(deployment, rows, timing)
        return run.spent_ns["A2E"], run.spent_ns["E2A"] - run.experts_ns

    def _weight_nbytes(self, part: Part, num_dies: int) -> int:
        """Return the bytes of weights on each of `num_dies` dies that share the routed experts."""
        held = -(-self.config.n_routed_experts // num_dies) if part in ("all", "routed") else 1
        specs = weight_specs(self.config, "int8", self.demand.max_len, held, 0)
        return sum(spec.nbytes for spec in select(specs, part).values())

    def kv_nbytes(self) -> int:
        """Return the bytes of an average request's KV at its end."""
        width = entries_nbytes(self.config, "int8", self.config.num_hidden_layers)
        return -(-self.demand.mean_len // BLOCK) * BLOCK * width

    def _prefill_rate(self, num_dies: int) -> float:
        """Return the prompt tokens per second of a prefill TE. Layers with experts take equally long, so two
        are run; if layers share an indexer's choice, all are run."""
        if self.config.shared_choices:
            return 1e9 / self._prefill_ns(self.checkpoint, num_dies)
        one, two = (self._prefill_ns(self._shallow(count), num_dies) for count in (1, 2))
        return 1e9 / (one + (self.num_moe - 1) * (two - one))

    def _prefill_ns(self, checkpoint: Checkpoint, num_dies: int) -> float:
        """Measure the time of a prompt token in a timing-only run, with two prompts in each DP group of a
        prefill TE."""
        from xdeepserve.engine.dp.sampling_params import SamplingParams
        from xdeepserve.llm import LLM

        prefill = {"dies": num_dies, "max_num_batched_tokens": 2 * self.demand.prompt}
        deployment = decode_deployment("pd", self.demand, 16, prefill=prefill, decode={"dies": SAMPLE})
        with LLM(checkpoint, deployment, timing_only=True) as llm:
            groups = len(llm.engine.je.tes[0].groups)
            prompts = [[5] * self.demand.prompt] * (2 * groups)
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        last = max(out.metrics.ttft_ns or 0 for out in outputs if out.metrics is not None)
        return last / (2 * groups * self.demand.prompt)


def usable_nbytes(hbm_bytes: float) -> int:
    return math.floor(USABLE * hbm_bytes)
