"""What requests must not leave behind."""

from __future__ import annotations

import asyncio

from xdeepserve.engine.serving.engine import Engine


def check_nothing_is_left(engine: Engine) -> None:
    """No block, transfer, claim or note of any request."""
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    for group in engine.groups:
        scheduler = group.scheduler
        assert not any((scheduler.handover.sending, scheduler.handover.reserved, scheduler.places.tickets))
        assert not any((scheduler.places._place, group._by_layer, group._num_ended, group._offers))
        assert all(endpoint.num_open == 0 for endpoint in group.endpoints)
        assert all(not endpoint._early_wants for endpoint in group.endpoints)
        assert all(not len(die.memory.claims) for die in group.dies)
    je = engine.je
    assert not any((je.transfers, je._jobs, je.links._failures))


async def settled(engine: Engine) -> None:
    """Let what has no request any more come to its end."""
    for _ in range(5000):
        if engine.stats().kv_cache_usage == 0 and not engine.je.transfers:
            break
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
