"""Lists the TEs of a deployment and their dies, or the errors in them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from xdeepserve.engine.deploy.deployment import AttentionConfig, Deployment, Device, ExpertConfig, TEConfig
from xdeepserve.engine.deploy.expert_services import reasons_against_services
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, SECTIONS, TEKind, is_listed, is_one_die, sections
from xdeepserve.engine.deploy.settings import instead
from xdeepserve.hw.accelerators import NPUS_PER_SERVER
from xdeepserve.model.config import TP_SIZES, ModelConfig, tp_sizes

NO_SHARING = "is not for deepseek_v4, in which a die has its tokens' streams to itself: set 1"
SHARED_INPUTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")


class ReplicaRoom(NamedTuple):
    """Setting that says how much room the dies of a TE have for replicas of routed experts."""

    key: str
    slots: int = 0  # of each die with experts
    per_die: int | None = None  # experts of each die in all, in place of `slots`

    @property
    def is_empty(self) -> bool:
        """Whether there is no room for replicas."""
        return not self.slots and self.per_die is None


class TEDies(NamedTuple):
    """TE with a known number of dies, not yet fitted to the model."""

    name: str
    kind: TEKind
    num_dies: int  # of DP groups
    given: TEConfig = TEConfig()  # with `tp` filled in
    num_routed_dies: int = 0  # of their own; 0: experts live with attention
    num_shared_dies: int = 0  # with a copy of the shared expert for others, of their own or with attention
    devices: tuple[Device, Device] = ("cm384", "cm384")  # of attention, of experts on dies of their own
    room: ReplicaRoom = ReplicaRoom("experts.redundant_slots")
    num_tes: int = 1  # like this one, which share its expert servers
    has_servers: bool = (
        True  # on dies of its own, where experts have such; false: it shares those of a TE before
    )
    num_peers: int = 0  # dies of DP groups of the TEs between which and this one KV moves

    @property
    def num_holders(self) -> int:
        """Number of dies for experts, those of the shared expert last."""
        return self.num_routed_dies + self.num_shared_dies if self.num_routed_dies else self.num_dies

    @property
    def total(self) -> int:
        """Number of all dies of the TE."""
        return self.num_dies + (self.num_holders if self.num_routed_dies and self.has_servers else 0)

    @property
    def is_mixed(self) -> bool:
        """Whether attention or experts have hardware that UB does not reach."""
        return self.devices != ("cm384", "cm384")

    @property
    def is_foreign(self) -> bool:
        """Whether the TE's dies are on 910B servers."""
        return self.given.hardware != "cm384"


def num_routed_experts(config: ModelConfig, mtp: int) -> int:
    """Return the number of routed experts per layer; 0 if no layer in use has any.

    MTP layers count where they are used.
    """
    used_layers = config.num_hidden_layers + min(mtp, config.num_nextn_predict_layers)
    return config.n_routed_experts if any(config.is_moe(i) for i in range(used_layers)) else 0


class Teams:
    """Makes the TEs of a deployment; `reasons` collects errors in their settings.

    A run that `is_timing_only` takes redundant slots for granted.
    """

    def __init__(self, d: Deployment, config: ModelConfig, is_timing_only: bool) -> None:
        self.d, self.config = d, config
        self.is_timing_only = is_timing_only
        self.num_experts = num_routed_experts(config, d.mtp)
        self.reasons: list[str] = []

    def tes(self) -> list[TEDies]:
        """Make all TEs, in the order of the rows that the deployment is made of."""
        tes = self._tes()
        total = {
            role: sum(te.num_dies for te in tes if te.kind.role == role) for role in ("prefill", "decode")
        }
        peers = {"prefill": total["decode"], "decode": total["prefill"]}
        return [te._replace(num_peers=peers.get(te.kind.role, 0)) for te in tes]

    def _tes(self) -> list[TEDies]:
        """Make all TEs, each by itself."""
        known = sections(self.d.kind)
        is_one = is_one_die(self.d.kind)
        has, own = ("is one die", set()) if is_one else (f"has {', '.join(sorted(known))}", known)
        self.reasons += [
            f"{each} is no setting of {self.d.kind}, which {has}{instead(each, value, own)}"
            for each in SECTIONS
            if (value := getattr(self.d, each)) is not None and each not in known
        ]
        if is_listed(self.d.kind):
            return self._listed()
        make = {True: self._apart, False: self._together}
        return [te for row in DEPLOYMENTS[self.d.kind] for te in make[row.is_apart](row)]

    def _listed(self) -> list[TEDies]:
        """Make the TEs of the deployment's list [[te]]."""
        entries = self.d.te or ()
        roles = {entry.role for entry in entries}
        if not entries:
            self.reasons.append(f"{self.d.kind} needs a list of TEs, [[te]]")
        elif len(roles & {"prefill", "decode"}) == 1:
            self.reasons.append("TEs of role prefill need some of role decode, and the other way round")
        rows, found, numbers = {row.role: row for row in DEPLOYMENTS[self.d.kind]}, [], Counter[str]()
        for at, entry in enumerate(entries):
            row = rows[entry.role]
            for team in self._teams(row, entry, f"te[{at}]."):
                found.append(team._replace(name=row.te_name(numbers[row.role])))
                numbers[row.role] += 1
        return found

    def _together(self, row: TEKind) -> list[TEDies]:
        """Make the TEs of a kind whose dies hold attention and experts."""
        section, prefix = row.section, f"{row.section}." if row.section else ""
        te = getattr(self.d, section) or TEConfig() if section else self._of_the_pod(row)
        return self._teams(row, te, prefix)

    def _teams(self, row: TEKind, te: TEConfig, prefix: str) -> list[TEDies]:
        """Make as many TEs as are asked for; `prefix` begins the names of their settings."""
        if te.hardware != "cm384" and row.role != "prefill":
            self.reasons.append(
                f"{prefix}hardware={te.hardware}: decode needs the interconnect of CloudMatrix dies; "
                "TEs of role prefill may have 910b"
            )
        shared, shared_key = self._shared_among(row, te, prefix)
        room = self._room(te, prefix)

        def num_of(tp: int = 1, group: str = "") -> int:
            num_dies = self._dies(f"{prefix}dies", te.dies, row.dies, room, tp, group, shared)
            if 1 <= num_dies <= shared:
                self.reasons.append(f"{shared_key}={shared} leaves no die of {num_dies} for routed experts")
            return num_dies

        if te.o_proj_tp != 1:
            tp = 1
            of_projection = self._o_proj_tp(f"{prefix}o_proj_tp", te)
            num_dies = num_of(of_projection, f"o_proj_tp={of_projection}")
        elif te.tp is None:
            num_dies = num_of()
            sizes = tp_sizes(self.config, te.tp_mode)
            tp = max(size for size in sizes if size <= row.tp and not num_dies % size)
        else:
            tp = self._tp(f"{prefix}tp", te)
            num_dies = num_of(tp)
        if row.is_single and num_dies != 1:
            self.reasons.append(
                f"{self.d.kind} is one die, not dies={num_dies}; colocated spreads over several"
            )
        self._check_limits(prefix, te, num_dies)
        given = msgspec.structs.replace(te, tp=tp)
        return [
            TEDies(row.te_name(i), row, num_dies, given, num_shared_dies=shared, room=room)
            for i in range(te.count)
        ]

    def _shared_among(self, row: TEKind, te: TEConfig, prefix: str) -> tuple[int, str]:
        """Return the number of attention dies with a shared-expert copy for all others, and its setting; 0 if
        each has its own."""
        shared, key = te.shared_dies, f"{prefix}shared_dies"
        if shared is None:
            shared, key = self._experts.shared_dies if row.can_share else None, "experts.shared_dies"
        shared = shared or 0
        if shared > 0 and not (self.num_experts and self.config.n_shared_experts):
            self.reasons.append(f"the model has no shared expert, found {key}={shared}")
        elif shared > 0:
            self._check_shared_inputs()
        return shared, key

    @property
    def _experts(self) -> ExpertConfig:
        return self.d.experts or ExpertConfig()

    def _room(self, te: TEConfig | ExpertConfig, prefix: str) -> ReplicaRoom:
        """Return a TE's room for replicas: as its own settings say, or else those of all experts."""
        slots, per_die = te.redundant_slots, te.experts_per_die
        if slots is None and per_die is None:
            return self._room(self._experts, "experts.")
        if slots and per_die is not None:
            self.reasons.append(
                f"{prefix}redundant_slots={slots} and {prefix}experts_per_die={per_die} both say how much "
                "room there is for replicas: choose one"
            )
        name = "redundant_slots" if per_die is None else "experts_per_die"
        return ReplicaRoom(f"{prefix}{name}", slots or 0, per_die)

    def _check_shared_inputs(self) -> None:
        if any(each.endswith(SHARED_INPUTS) for each in self.config.kept_float):
            self.reasons.append(
                "the checkpoint's INT8 recipe keeps gate_proj and up_proj of a shared expert in float, "
                f"and {self.d.kind} sends INT8 rows to the shared expert's dies"
            )

    def _of_the_pod(self, row: TEKind) -> TEConfig:
        """Gather the TE settings outside of sections, for a deployment of a single TE."""
        d = self.d
        if "tp" not in row.sections:
            return TEConfig(dies=d.dies)
        o_proj_tp = 1 if d.o_proj_tp is None else d.o_proj_tp
        return TEConfig(dies=d.dies, tp=d.tp, tp_mode=d.tp_mode or "tp", o_proj_tp=o_proj_tp)

    def _check_limits(self, prefix: str, te: TEConfig, num_dies: int) -> None:
        if te.hardware == "910b" and num_dies > NPUS_PER_SERVER:
            self.reasons.append(
                f"{prefix}dies={num_dies} do not fit in a 910B server, whose {NPUS_PER_SERVER} NPUs "
                f"share memory among themselves alone; {prefix}count makes more TEs"
            )

    def _apart(self, row: TEKind) -> list[TEDies]:
        """Make the TEs of a kind whose experts have dies of their own.

        There is one, or several that share expert servers.
        """
        d, config, reasons = self.d, self.config, self.reasons
        attention, experts = d.attention or AttentionConfig(), d.experts or ExpertConfig()
        name = row.te_name(0)
        rows = d.scheduler.max_num_batched_tokens
        if attention.microbatches > rows:
            reasons.append(
                f"attention.microbatches={attention.microbatches} is more than the {rows} rows of a step"
            )
        if not self.num_experts:
            reasons.append(f"{d.kind} needs a model with routed experts")
            return [TEDies(name, row, 1)]
        wanted = experts.routed_dies
        if wanted is None and experts.counts is not None:
            wanted = len(experts.counts)
        room = self._room(experts, "experts.")
        routed = self._dies("experts.routed_dies", wanted, row.dies, room)
        shared = experts.shared_dies
        if shared is None:  # with copies of the routed ones two, so that one of them may be lost
            least = 2 if row.has_services and experts.copies else 1
            shared = max(least, routed // 8) if config.n_shared_experts else 0
        if row.has_services:
            reasons += reasons_against_services(d, self.num_experts, routed)
        if shared >= 0 and bool(shared) != bool(config.n_shared_experts):
            kind = "needs dies for its shared expert" if config.n_shared_experts else "has no shared expert"
            reasons.append(f"the model {kind}, found experts.shared_dies={shared}")
        self._check_shared_inputs()
        num_dies = attention.domains * attention.dies
        vacant = max(0, experts.vacancies) if row.has_services else 0
        devices = attention.hardware, experts.hardware
        num_tes = attention.count if row.has_services else 1
        te = TEDies(name, row, num_dies, TEConfig(tp=1), routed + vacant, shared, devices, room, num_tes)
        return [te._replace(name=row.te_name(n), has_servers=not n) for n in range(num_tes)]

    def _dies(
        self,
        key: str,
        dies: int | None,
        default: int,
        room: ReplicaRoom,
        tp: int = 1,
        group: str = "",
        num_shared: int = 0,
    ) -> int:
        """Decide the number of dies: as asked for, or by default as many as the experts can be on.

        The number must be made of groups of `tp`, which the setting `group` gives. `num_shared` of the dies
        have a copy of the shared expert, and no routed experts of their own. With `room` for replicas there
        may be more dies than routed experts: the rest hold replicas alone.
        """
        num_dies = dies
        if num_dies is None:
            fitting = min(default, self.num_experts or default)
            num_dies = max(tp, fitting - fitting % tp)
        if num_dies < 1:
            return num_dies  # `out_of_bounds` refuses it
        is_free = self.is_timing_only or not room.is_empty or self._experts.copies > 0
        if num_dies <= num_shared:
            return num_dies  # and so is this
        if self.num_experts and num_dies - num_shared > self.num_experts and not is_free:
            most = self.num_experts + num_shared
            self.reasons.append(
                f"{key}={num_dies} is more than the model's {self.num_experts} routed experts"
                f"; set {key}={most - most % tp}, or take a model with {num_dies - num_shared} or more"
            )
        elif num_dies % tp:
            self.reasons.append(f"{key}={num_dies} cannot be groups of {group or f'tp={tp}'}")
        return num_dies

    def _o_proj_tp(self, key: str, te: TEConfig) -> int:
        """Return the number of DP groups that share an output projection; 1 if the setting is invalid."""
        size, heads = te.o_proj_tp, self.config.num_attention_heads
        if size not in TP_SIZES:
            self.reasons.append(f"{key} must be one of {', '.join(map(str, TP_SIZES))}, found {size}")
            return 1
        if heads % size:
            self.reasons.append(f"{key}={size} does not divide the model's {heads} heads")
        if te.tp not in (None, 1):
            self.reasons.append(f"{key}={size} is for DP groups of one die, found tp={te.tp}")
        elif self.config.v4 is not None and size > 1:
            self.reasons.append(f"{key}={size} {NO_SHARING}")
        return size

    def _tp(self, key: str, te: TEConfig) -> int:
        """Return the number of dies of a DP group; 1 if the setting is invalid."""
        tp, config = te.tp, self.config
        assert tp is not None
        if tp not in TP_SIZES:
            self.reasons.append(f"{key} must be one of {', '.join(map(str, TP_SIZES))}, found {tp}")
            return 1
        if config.num_attention_heads % tp:
            self.reasons.append(f"{key}={tp} does not divide the model's {config.num_attention_heads} heads")
        elif config.v4 is not None and tp > 1:
            self.reasons.append(f"{key}={tp} {NO_SHARING}")
        elif tp not in tp_sizes(config, te.tp_mode):
            self.reasons.append(
                f"{key}={tp} does not divide the intermediate size {config.intermediate_size} of the model's "
                "dense layers; sp-tp-sp does not cut them"
            )
        return tp
