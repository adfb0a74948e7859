"""Network cards between attention and experts: when they carry tokens, and which settings exclude them."""

from __future__ import annotations

from xdeepserve.engine.deploy.deployment import AttentionConfig, Carrier, Deployment, ExpertConfig
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, has_services


def devices_of(d: Deployment) -> tuple[str, str]:
    """Return the hardware of attention dies and of expert dies."""
    return (d.attention or AttentionConfig()).hardware, (d.experts or ExpertConfig()).hardware


def carrier_of(d: Deployment) -> Carrier:
    """Choose the carrier of tokens to expert dies: as set, else network cards if there is no UB."""
    asked = (d.attention or AttentionConfig()).carrier
    return asked or ("mte" if devices_of(d) == ("cm384", "cm384") else "rdma")


def off_ub(d: Deployment) -> str:
    """Name the settings of attention and expert hardware that UB does not reach; "" if there are none.

    All dies of such a TE are beside the SuperPod.
    """
    return " and ".join(
        f"{key}={device}"
        for key, device in zip(("attention.hardware", "experts.hardware"), devices_of(d), strict=True)
        if device != "cm384"
    )


def reasons_against(d: Deployment) -> list[str]:
    """List errors in the hardware of attention and experts, and in network cards between them."""
    carrier, names, reasons = carrier_of(d), off_ub(d), []
    has_steps = any("away-and-back" in row.turns for row in DEPLOYMENTS[d.kind])
    if names and has_services(d.kind):
        reasons.append(
            f"{names}: clients of expert services write and read themselves, and M2N's messages are taken by "
            "who receives them"
        )
    elif names and not has_steps:
        reasons.append(f"{names}: only moe-attention and transformerless have them apart, not {d.kind}")
    elif names and carrier != "rdma":
        reasons.append(f"{names}: no UB leads there; attention.carrier={carrier} needs it, rdma does not")
    if carrier != "rdma" or not has_steps:
        return reasons
    what = "attention.carrier=rdma" if not names else f"M2N, by which {names} is reached,"
    if d.dataflow:
        reasons.append(f"{what} waits for every sender, and dataflow for nobody: choose one")
    if d.exchange == "push":
        reasons.append(f"{what} has no trampolines, which exchange=push is between")
    if d.lockstep:
        reasons.append(f"{what} goes from card to card without a group, and lockstep takes a group as one")
    return reasons
