"""Pods with dies for experts, small and of odd shapes."""

# Domains, attention dies in each, routed and shared expert dies, microbatches: A < X, A == X, A > X,
# and experts that do not divide evenly.
SHAPES = [(2, 2, 4, 1, 2), (1, 3, 2, 1, 1), (3, 1, 3, 2, 2), (1, 5, 1, 1, 3), (4, 2, 5, 3, 1)]


def overrides(shape: tuple[int, ...], *more: str) -> list[str]:
    """Settings of a `moe-attention` deployment of a shape."""
    domains, dies, routed, shared, microbatches = shape
    return [
        f"attention.domains={domains}",
        f"attention.dies={dies}",
        f"attention.microbatches={microbatches}",
        f"experts.routed_dies={routed}",
        f"experts.shared_dies={shared}",
        "max_model_len=64",
        *more,
    ]
