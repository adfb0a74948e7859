"""The cost of a TE's step by its counts, measured in timing-only runs of the engine itself.

A step waits for the DP group with the slowest attention, for the exchange of the group with most rows, and
for experts, which receive the rows of all groups. So its price is

    own(rows of the fullest group) + feed(rows of all groups) + attention(context of the group with most)
        + sample(rows with logits of the group that has most)

`own` and `feed` are interpolated in tables. The tables come from steps of all groups with equally many rows,
and of few groups with one row. Attention is priced by the attending stage of the Program, for the exact
counts, and sampling by the stages that read logits; a step without logits, of chunks alone, does not sample.
What the host adds to a step (`Host.mean_ns`) comes on top, where the deployment has an `[execution]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.description import lack
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import InputError
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.tensors import Layer
from xdeepserve.prices.curve import Curve, Progress, measured, with_blocks
from xdeepserve.prices.step_run import DecodeRun, StepShare, one_step
from xdeepserve.step.passes import EMBED, HEAD, MTP_HEAD
from xdeepserve.step.stage import Counts, Meet, Program, stages

# Few rows leave experts untouched, whose weights are then not read, and some hundred are where a die's GEMMs
# begin to be bound by computing: there the points have to be dense.
ROWS = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448,
    512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192,
)  # fmt: skip
SAMPLE = 4  # groups that stand for all where all have equally many rows, one for each expert at least
ATTENTION = ("MLA", "GQA")
SAMPLING = ("Sample", "Draft")
LONG, MAX_OFF = 4096, 0.01
FEW, MANY = 64, 1024  # rows to whose attention it is best absorbed, and best plain, after LONG positions
LEAST_ROWS = 16  # of a step, to see a line in


class StepCounts(NamedTuple):
    """Counts of a TE's step that determine its price.

    fullest    rows of the DP group that has most
    rows       of all groups
    context    positions that rows of one group attend to, summed over rows: of the group with most
    kv_tokens  cached positions that this group reads
    logits     rows with logits, of the group that has most
    """

    fullest: int
    rows: int
    context: float
    kv_tokens: float
    logits: int = 1


class AttentionPrice(msgspec.Struct, frozen=True):
    """Prices of attention in a step's layers, in ns: of an attended position, absorbed or plain; of a cached
    position, whose keys and values plain attention makes anew; and of one that is read."""

    absorbed: float
    plain: float
    per_earlier: float
    per_kv_token: float

    def __call__(self, rows: float, context: float, kv_tokens: float) -> float:
        """Price attention, absorbed where that is less, or as the time to read its KV if that is more."""
        plain = self.plain * context + self.per_earlier * max(0.0, kv_tokens - rows)
        return max(min(self.absorbed * context, plain), self.per_kv_token * kv_tokens)


class StepEnds(msgspec.Struct, frozen=True):
    """Times [ns] of a DP group in a step before the first exchange and after the last, by its rows.

    No group waits for another there. `share` of attention comes before the first exchange, and a row with
    logits is sampled after the last one in `sample` ns. A group without rows has nothing to do in both.
    """

    before: Curve = Curve((0.0,), (0.0,))
    after: Curve = Curve((0.0,), (0.0,))
    share: float = 0.0
    sample: Curve = Curve((0.0,), (0.0,))

    def tail(self, rows: int, logits: int) -> float:
        """Return the time [ns] of a group from a step's last exchange to its own end."""
        return self.after(rows) + (self.sample(logits) if logits else 0.0)


class StepPrice(msgspec.Struct, frozen=True):
    """Prices of steps on a kind of TE, in ns."""

    num_groups: int
    own: Curve  # by rows of the fullest group
    feed: Curve  # by rows of all
    attention: AttentionPrice
    gap: float  # between two steps: the host's
    sample: Curve = Curve((1.0,), (0.0,))  # by rows with logits
    ends: StepEnds = StepEnds()  # parts of the price, in which groups are apart

    def __call__(self, counts: StepCounts) -> float:
        """Price a step, with the host's gap after it, in ns."""
        attention = self.attention(counts.fullest, counts.context, counts.kv_tokens)
        sample = self.sample(counts.logits) if counts.logits else 0.0
        return self.gap + self.own(counts.fullest) + self.feed(counts.rows) + attention + sample

    def together(self, fullest: int, rows: int, logits: int) -> float:
        """Price a step from its first exchange to its last, with the host's gap and without attention."""
        ends, sample = self.ends, self.sample(logits) - self.ends.sample(logits) if logits else 0.0
        own = self.own(fullest) - ends.before(fullest) - ends.after(fullest)
        return self.gap + own + self.feed(rows) + sample


def priced(
    checkpoint: Checkpoint,
    deployment: Deployment,
    progress: Progress = lambda done, total: None,
    rows: Sequence[int] = ROWS,
) -> StepPrice:
    """Measure the prices of a deployment's TE, with tables at some numbers of `rows`. Raises InputError if
    it has several TEs, or cannot be priced this way."""
    host, deployment = deployment.execution, with_room(deployment)
    plan = PodPlan(checkpoint, deployment, timing=TimingConfig())
    _check_priced(plan)
    groups, most = plan.tes[0].sizes.groups, max(LEAST_ROWS, plan.tes[0].sizes.steps.max_tokens)
    num_groups, num_experts = groups.num_groups, plan.config.n_routed_experts
    few = [count for count in rows if count < num_groups]
    all_rows = [count for count in rows if count < most] + [most]
    sample = SAMPLE * (deployment.tp or 1)
    can_sample = sample < groups.num_dies and not _has_replicas(plan)

    def step(filled: tuple[int, int]) -> DecodeRun:
        """Run a step in which the first `count` DP groups have a prompt of `rows` rows."""
        count, rows = filled
        given, of_dies = deployment, None
        if count == num_groups and rows * count >= num_experts and can_sample:
            given, of_dies = msgspec.structs.replace(deployment, dies=sample), groups.num_dies
        shares = [StepShare(0, rows)]
        timing = TimingConfig(of_dies=of_dies)
        return one_step(checkpoint, given, lambda group: shares * (group < count), timing)

    points = [(count, 1) for count in few] + [(num_groups, rows) for rows in all_rows]
    runs = measured(points, step, progress)
    full = [runs[num_groups, rows] for rows in all_rows]
    sampled = full[0].spent(*SAMPLING)
    own = [run.iteration_ns - run.spent(*ATTENTION) - _feed(run) - sampled for run in full]
    alone = own[0] + sampled
    sparse = [runs[count, 1].iteration_ns - runs[count, 1].spent(*ATTENTION) - alone for count in few]
    feed = Curve(tuple(count * rows for count, rows in points), (*sparse, *map(_feed, full)))
    engine = Engine(PodPlan(checkpoint, deployment, timing=TimingConfig()))
    engine.load()
    executor = next(iter(engine.je.tes)).executors[0]
    attention = _attention(deployment.name, executor, full[-1], most)
    sampling = _sample(executor, full[0], plan.tes[0].sizes.steps)
    ends = _ends(executor, all_rows, plan.tes[0].sizes.steps)
    own_curve = Curve(tuple(all_rows), tuple(own))
    price = StepPrice(num_groups, own_curve, feed, attention, 0.0, sampling, ends)
    if host is None:
        return price
    delays = Host(host.for_role("both"), plan.pod.spec, num_groups)
    shortest = price(StepCounts(1, num_groups, 0.0, 0.0))
    if delays.config.overlap and shortest < delays.ahead_ns():
        raise InputError(
            f"deployment {deployment.name}: execution.overlap=true plans a step while the one before runs, "
            f"and steps of {shortest / 1e6:.2f} ms are shorter than the {delays.ahead_ns() / 1e6:.2f} ms "
            "which that takes: such steps have no price of their own"
        )
    return msgspec.structs.replace(price, gap=delays.mean_ns())


def _has_replicas(plan: PodPlan) -> bool:
    """Whether a plan's TE has redundant experts, for which a few dies cannot stand for all."""
    return plan.tes[0].sizes.experts.has_slots


def _check_priced(plan: PodPlan) -> None:
    """Raise InputError if a plan has several TEs, or one whose steps have no price of their own."""
    name, sizes = plan.deployment.name, plan.tes[0].sizes
    if len(plan.tes) > 1 or sizes.experts.where == "away" or sizes.walk.num_parts > 1:
        raise InputError(
            f"deployment {name}: a TE at the grain of a step is one of kind monolithic or colocated, with "
            "one microbatch"
        )
    if missing := lack(plan):
        raise InputError(f"deployment {name}: {missing}")


def with_room(deployment: Deployment) -> Deployment:
    """Give the deployment KV for a step of any counts; prices do not depend on the amount."""
    rows = max(LEAST_ROWS, deployment.scheduler.max_num_batched_tokens)
    block = deployment.cache.block_size
    scheduler = msgspec.structs.replace(deployment.scheduler, max_num_batched_tokens=rows)
    num_blocks = 4 + -(-rows // block)
    changes = {"scheduler": scheduler, "max_model_len": rows + 8, "execution": None}
    return with_blocks(deployment, num_blocks, block, **changes)


def _feed(run: DecodeRun) -> float:
    """Return the time [ns] until the busiest die has fed its experts; the others wait for it in the
    combine."""
    return run.spent("Experts") + run.spent("combine") - run.combine_ns


def _logit_rows(steps: StepSizes) -> tuple[int, ...]:
    """List numbers of rows with logits; up to some, reading the head takes longer than to compute with it."""
    most = max(2, steps.max_logit_rows)
    return *(count for count in ROWS if count < most), most


def _sample(executor: Executor, run: DecodeRun, steps: StepSizes) -> Curve:
    """Price the stages that read logits, up to the most rows with logits that a step has.

    `run` has one such row in each DP group, and as many passes of the MTP layer as there are drafts.
    """
    layer, price = executor.weights.layers[-1], executor.runner.price_of
    rows = _logit_rows(steps)
    spent = [0.0] * len(rows)
    for stage in stages(HEAD) + stages(MTP_HEAD):
        if stage.rows == "logits" and (one := price(stage, layer, Counts(1))):
            of_sequence = 1 if stage.name == "Sample" else 1 + steps.mtp  # drafts have a row for each
            for at, num in enumerate(rows):
                each = price(stage, layer, Counts(max(1, num / of_sequence)))
                spent[at] += run.spent(stage.name) * each / one
    return Curve(rows, tuple(spent))


def _ends(executor: Executor, rows: Sequence[int], steps: StepSizes) -> StepEnds:
    """Price a die's time alone in a step: the layers up to the first exchange, and all after the last one.

    Sampling follows the last exchange, or the last draft does, where the MTP layer exchanges after sampling.
    """
    layers, programs, price = executor.weights.layers, executor.traversal.programs, executor.runner.price_of
    first = next((at for at, layer in enumerate(layers) if layer.moe is not None), None)
    if first is None:
        return StepEnds()
    before: list[tuple[Layer, Program]] = [(layers[0], EMBED)]
    before += [
        (layer, program.attention) for layer, program in zip(layers[: first + 1], programs, strict=False)
    ]
    before += [(layer, program.feed) for layer, program in zip(layers[:first], programs, strict=False)]
    exchanges = [at for at, item in enumerate(programs[first].feed) if isinstance(item, Meet)]
    if not exchanges:
        return StepEnds()
    before.append((layers[first], programs[first].feed[: exchanges[0]]))
    after = programs[first].feed[exchanges[-1] + 1 :]
    if not steps.mtp:
        after += tuple(stage for stage in stages(HEAD) if stage.rows == "all")

    def spent(parts: Sequence[tuple[Layer, Program]], rows: float) -> float:
        return sum(
            price(stage, layer, Counts(rows))
            for layer, part in parts
            for stage in stages(part)
            if not stage.attends
        )

    (last,) = [each for each in stages(MTP_HEAD if steps.mtp else HEAD) if each.rows == "logits"]
    each = 1 + steps.mtp if steps.mtp else 1
    counts = _logit_rows(steps)
    of_rows = [0, *rows]
    return StepEnds(
        Curve.of(of_rows, lambda count: spent(before, count) if count else 0.0),
        Curve.of(of_rows, lambda count: spent([(layers[first], after)], count) if count else 0.0),
        (first + 1) / (len(layers) + steps.mtp),
        Curve.of(counts, lambda count: price(last, layers[first], Counts(max(1, count / each)))),
    )


def _attention(deployment: str, executor: Executor, run: DecodeRun, rows: int) -> AttentionPrice:
    """Compute the prices of attention in all layers.

    A layer's costs come from its own Program; the number of layers, with MTP's passes, comes from a run.
    """
    layer, program = executor.weights.layers[-1], executor.traversal.programs[-1]
    (stage,) = [each for each in stages(program.attention) if each.attends]

    if stage.name not in ATTENTION:
        raise InputError(f"deployment {deployment}: {stage.name} is not in proportion to the context")

    def price(context: float, kv_tokens: float) -> float:
        return executor.runner.price_of(stage, layer, Counts(1, context, kv_tokens))

    # A row's own attention is plain, if it may be; a few rows' to many earlier positions is absorbed.
    plain, absorbed = price(LONG, 0) / LONG, price(FEW * LONG, LONG) / (FEW * LONG)
    earlier = max(0.0, price(MANY * LONG, LONG) - plain * MANY * LONG) / (LONG - 1)
    of_layer = AttentionPrice(absorbed, plain, earlier, price(0, LONG) / LONG)
    for context in (3 * LONG, 2 * MANY * LONG):
        if abs(of_layer(1, context, LONG) - (found := price(context, LONG))) > MAX_OFF * found:
            raise InputError(f"deployment {deployment}: {stage.name} is not in proportion to the context")
    layers = run.spent(*ATTENTION) / of_layer(rows, rows * (rows + 1) / 2, rows)
    return AttentionPrice(*(layers * each for each in msgspec.structs.astuple(of_layer)))
