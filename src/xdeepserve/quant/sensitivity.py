"""Mixed precision: the choice of linear layers that stay in floating point (CloudMatrix384 4.5, xDeepServe
4.7).

Before anything is written, every layer outside the routed experts is quantised on trial, with the original
model's inputs and the method's techniques. Layers are then ranked by the error of their outputs. A layer
stays float if its error is more than `ratio` times the median. The worst come first, as long as they hold no
more than `share` of the model's quantised weights. Layers that run as one kernel stay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

# Modules that serving systems run as one kernel, so all are INT8 or none is.
PARTNERS = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "k_proj", "v_proj"))


def sensitive_layers(
    errors: Mapping[str, float], sizes: Mapping[str, int], ratio: float, budget: float
) -> frozenset[str]:
    """Choose the modules to keep in float; errors by module, relative and squared; sizes and budget in
    weights.

    A group of partners counts as one module, with the larger error and the sum of sizes. A group that does
    not fit into the budget is skipped.
    """
    if not errors:
        return frozenset()
    limit = ratio * median(errors.values())
    groups = {partners(module, errors) for module in errors}
    worst = {group: max(errors[module] for module in group) for group in groups}
    kept: set[str] = set()
    left = budget
    for group in sorted(groups, key=lambda group: (-worst[group], group)):
        size = sum(sizes[module] for module in group)
        if worst[group] > limit and size <= left:
            kept.update(group)
            left -= size
    return frozenset(kept)


def partners(module: str, known: Mapping[str, object]) -> tuple[str, ...]:
    """Return `module` and the known modules that run in the same kernel, sorted."""
    for group in PARTNERS:
        for name in group:
            if module.endswith(f".{name}"):
                prefix = module.removesuffix(name)
                return tuple(sorted(prefix + one for one in group if prefix + one in known))
    return (module,)
