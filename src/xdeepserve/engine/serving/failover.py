"""Failover: brings up a TE in the place of one that was given up (xDeepServe 6.2, stages 2 and 1).

It is the mend of one rung of the ladder, `replace` (`engine/recovery/ladder.py`), and takes long: FAILOVER
has its states. An error on the way goes to the ladder as a loss of its own, `replacement`.

    test      which of its dies are well (hw/self_test.py); the others nobody gets again
    replace   stage 2: a TE of its role on the dies that are free; if there are fewer than it had, with fewer
              DP groups and EP ranks (deploy/scale_down.py)
    take      decode that finds no room takes the dies of a prefill TE that the others can do without
    restart   stage 1: all TEs are given up and come back, decode before prefill

Prefill and decode fail over separately. Requests that must wait for a TE of some role wait in the job
executor.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import ExpertConfig, RecoveryConfig, Role, TEConfig
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, is_listed
from xdeepserve.engine.serving.joining import FAILED, until_unused
from xdeepserve.engine.serving.kept_kv import KeptKV
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DeploymentError, XDeepServeError, as_named
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.self_test import well_dies
from xdeepserve.machine import follow

Stage: TypeAlias = Literal["serving", "testing", "replacing", "taking", "restarting"]
FAILOVER: dict[tuple[Stage, str], Stage] = {
    ("serving", "lose"): "testing",
    ("testing", "test"): "replacing",
    ("replacing", "join"): "serving",
    ("replacing", "find no room"): "taking",
    ("taking", "take"): "replacing",
    ("taking", "find nobody"): "restarting",
    ("restarting", "join"): "serving",
    ("restarting", "fail"): "serving",
    ("testing", "fail"): "serving",
    ("replacing", "fail"): "serving",
    ("taking", "fail"): "serving",
}
ORDER: tuple[Role, ...] = ("both", "decode", "prefill")


class Survivors(Protocol):
    """Calls made by Failover on the TEs that still serve a model."""

    def give_up_all(self, reason: XDeepServeError) -> list[TEPlan]: ...

    async def spare_prefill(self) -> bool: ...

    def take_back(self, te: TEPlan, well: Sequence[int]) -> None: ...


def what_helps(plan: PodPlan, te: TEPlan, lost: Collection[int]) -> str:
    """Name settings to make requests outlive the loss of these dies of a TE: each alone suffices. Called
    where nothing can serve without the TE; "" if no setting helps."""
    d, role, ways = plan.deployment, te.sizes.place.role, list[str]()
    row = next(row for row in DEPLOYMENTS[d.kind] if row.role == role)
    if row.has_services and not (d.experts or ExpertConfig()).copies:
        ways += ["experts.copies=1"] * (not set(lost).isdisjoint(te.sizes.place.expert_dies))
    if not d.recovery.failover and not plan.outside:
        # Stage 2 has the dies of the TE that are well, stage 1 those of all TEs.
        wanted = {plan.least_dies(role) - len(set(te.every_die) - set(lost))}
        well = [len(set(each.every_die) - set(lost)) for each in plan.tes]
        wanted.add(sum(plan.least_dies(each.sizes.place.role) for each in plan.tes) - sum(well))
        spare = max(0, min(wanted))
        if spare <= len(plan.pod.free_dies(range(plan.pod.topology.num_dies))):
            ways.append("recovery.failover=true" + f" and recovery.spare_dies={spare}" * (spare > 0))
    given = getattr(d, row.section, None) if not is_listed(d.kind) else None
    if isinstance(given, TEConfig):
        more = msgspec.structs.replace(given, count=given.count + 1)
        with contextlib.suppress(DeploymentError):
            fit(msgspec.structs.replace(d, **{row.section: more}), plan.config, plan.timing is not None)
            ways.append(f"{row.section}.count={more.count}")
    return ", or with ".join(ways)


class Failover:
    """Replaces lost TEs, in the order of their loss.

    `on_end` is called when none is missing any more, or with the error if one cannot be replaced. `hears` is
    told of an error in `on_end`.
    """

    def __init__(
        self,
        group: Survivors,
        join: Callable[[Role, list[int], KeptKV | None], Awaitable[str]],
        plan: PodPlan,
        config: RecoveryConfig,
        timeout_ns: int,
        on_end: Callable[[XDeepServeError | None], None],
        hears: Hears,
    ) -> None:
        self._hears = hears
        self._group, self._plan, self._config, self._timeout_ns = group, plan, config, timeout_ns
        self._join = join
        self._on_end, self._pod = on_end, plan.pod
        self._wanted = Counter(te.sizes.place.role for te in plan.tes)
        own = [die for te in plan.tes for die in te.every_die]
        beyond = range(max(own) + 1, plan.pod.topology.num_dies)
        self._dies = [*own, *beyond[: config.spare_dies]]
        self._lost: list[tuple[TEPlan, KeptKV | None]] = []
        self._is_running = False
        self.stage: Stage = "serving"
        self.reason: str | None = None  # of what is under way
        self.num_restarts = 0

    def begin(self, te: TEPlan, kept: KeptKV | None, reason: XDeepServeError) -> None:
        """Start to replace a TE that was given up, after those that are being replaced; `kept` is the KV on
        its dies."""
        self._lost.append((te, kept))
        self.reason = str(reason)
        if not self._is_running:
            self._is_running = True
            self._pod.clock.detach(self._run(), "failover", self._hears)

    def describe(self) -> str:
        """Describe the failover under way: stage, state and reason."""
        return f"stage {1 if self.stage == 'restarting' else 2}, {self.stage}: {self.reason}"

    def cannot_replace(
        self, te: TEPlan, die: int, prefills: Sequence[TEPlan], lost: Collection[int]
    ) -> str | None:
        """Explain why no TE could replace this one once a given die is lost; None if one could.

        `prefills` are the TEs whose dies decode could take, and `lost` the dies that are lost by now. Only
        certain room counts: the largest of `prefills` stays, and nothing is known while another TE is on its
        way.
        """
        if self._is_running:
            return f"another task executor is on its way ({self.describe()}): wait until it is there"
        role, num_free = te.sizes.place.role, len(self._pod.free_dies(self._dies)) + len(te.every_die) - 1
        if role == "decode":
            num_free += sum(sorted(len(each.every_die) for each in prefills)[:-1])
        if self._plan.most_dies(role, num_free) is not None:
            return None
        num_well = len(set(self._dies).difference(lost, [die]))
        num_needed = sum(self._plan.least_dies(role) for role in self._wanted)
        if num_well < num_needed:
            return f"the {num_well} dies that would be left are too few: {num_needed} are needed at least"
        if self.num_restarts >= self._config.max_restarts:
            return (
                f"no {role} task executor has room without die {die}, and all have been started anew "
                f"{self.num_restarts} times: recovery.max_restarts allows no more"
            )
        return None

    async def _run(self) -> None:
        error: XDeepServeError | None = None
        try:
            while self._lost:
                try:
                    await self._recover(*self._lost.pop(0))
                except Exception as found:
                    error = as_named(found)
                    self._move("fail")
        finally:
            self._is_running, self.reason = False, None
        self._on_end(error)

    async def _recover(self, te: TEPlan, kept: KeptKV | None) -> None:
        """Replace a TE, or restart all. Raises DeploymentError, or the failure on the way, if no TE can be
        had."""
        self._move("lose")
        await self._test(te, kept)
        self._move("test")
        role = te.sizes.place.role
        while not await self._replace(role, kept=kept):
            self._move("find no room")
            if role != "decode" or not await self._group.spare_prefill():
                self._move("find nobody")
                await self._restart()
                return
            self._move("take")
        self._move("join")

    async def _test(self, te: TEPlan, kept: KeptKV | None = None) -> None:
        """Test the dies of a given-up TE and free those that passed; no KV is `kept` on the others."""
        await until_unused(te)
        well = await well_dies(self._pod, te.every_die, self._timeout_ns)
        if kept is not None:
            kept.drop(set(te.every_die).difference(well))
        self._group.take_back(te, well)

    async def _replace(self, role: Role, spare: int = 0, kept: KeptKV | None = None) -> bool:
        """Stage 2: bring up a TE of the role, leaving `spare` dies free; if possible on dies that have `kept`
        KV. Returns whether it serves."""
        tried: list[int] = []
        while True:
            free = self._pod.free_dies(self._dies)
            num_dies = self._plan.most_dies(role, len(free) - spare)
            if num_dies is None:
                return False
            ordered = free if kept is None else kept.in_order(free)
            try:
                await self._join(role, ordered[:num_dies], kept)
            except DeploymentError:
                return False
            except FAILED:
                if free == tried == self._pod.free_dies(self._dies):  # all are well: it would end so again
                    raise
                tried = free
            else:
                return True

    async def _restart(self) -> None:
        """Stage 1: restart all TEs. Raises DeploymentError if a role gets no TE, or restarts are used up."""
        if self.num_restarts >= self._config.max_restarts:
            raise DeploymentError(
                f"all TEs have been started anew {self.num_restarts} times, and recovery.max_restarts allows "
                f"no more: {self.reason}"
            )
        self.num_restarts += 1
        given_up = self._group.give_up_all(XDeepServeError(f"all TEs are started anew: {self.reason}"))
        for te in [*given_up, *(lost for lost, _ in self._lost)]:
            await self._test(te)
        self._lost.clear()
        roles = [role for role in ORDER if self._wanted[role]]
        for at, role in enumerate(roles):
            for number in range(self._wanted[role]):
                later = sum(self._plan.least_dies(other) for other in roles[at + 1 :])
                if not await self._replace(role, later) and not number:
                    num_free = len(self._pod.free_dies(self._dies))
                    spare = self._config.spare_dies + self._plan.least_dies(role) + later - num_free
                    raise DeploymentError(
                        f"{num_free} dies that are well are not enough for a TE "
                        f"{'' if role == 'both' else f'of {role} '}"
                        f"(recovery.spare_dies={spare} would do): {self.reason}"
                    )
        self._move("join")

    def _move(self, event: str) -> None:
        self.stage = follow(
            FAILOVER, self.stage, event, lambda: f"failover cannot {event}: it is {self.stage}"
        )
