"""Times of attention, experts and messages on devices that are priced, not run: profiles by rows.

BF16 is priced launch by launch by the table that every run is billed from (`Spec.stage_ns`). The efficiencies
in it are assumed: nobody has timed BF16 on these devices, and a plan that uses them has to say so. Times that
are run instead are in `prices/profile.py`.
"""

from __future__ import annotations

from xdeepserve.hw.accelerators import Accelerator
from xdeepserve.planner.moe_shape import MoEShape
from xdeepserve.planner.search import NodeKind
from xdeepserve.prices.curve import Curve

NODE_ROWS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # of a node that is priced
MESSAGES = tuple(float(1 << i) for i in range(10, 25, 2))  # bytes
TP = (1, 2, 4, 8)


def message_curve(device: Accelerator) -> Curve:
    """Make the time of a message by size through a device's card: startup, then bytes, as in
    `hw/nic.Cards`."""
    startup, rate = device.spec.roce_startup.value, device.network.value
    return Curve.of(MESSAGES, lambda size: 1e9 * (startup + size / rate))


def attention_sides(shape: MoEShape, device: Accelerator, context: float) -> tuple[NodeKind, ...]:
    """Make attention nodes of each size, with the time of tensor parallelism's two reductions (MS 4.2)."""
    sides, capacity = [], device.hbm_nbytes
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
    """Make expert nodes of each size, with an expert on each."""
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
                fits=shape.expert_nbytes() < tp * device.hbm_nbytes,
            )
        )
    return tuple(sides)
