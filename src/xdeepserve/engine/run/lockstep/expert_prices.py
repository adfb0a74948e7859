"""Prices of experts in virtual time, by the rows that dies have received."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.spec import Spec

Ns = npt.NDArray[np.int64]
MAX_KEPT = 1 << 12  # prices that are kept


class ExpertPrices:
    """Prices of dies with experts in layers, which are passes of a step.

    `kinds` has the kind of each die by layer; dies of one kind take equally long for equal rows. `price` maps
    a layer, a die, its rows for routed experts and for a copy of the shared expert, and the routed copies to
    bill, to ns. `num_holders` dies share the `top_k` routed copies of each token.
    """

    def __init__(
        self,
        kinds: Mapping[int, Sequence[Hashable]],
        price: Callable[[int, int, int, int, float], float],
        top_k: int,
        num_holders: int,
        spec: Spec,
    ) -> None:
        self._price_of, self._top_k, self._num_holders, self._spec = price, top_k, num_holders, spec
        self._examples: list[tuple[int, int]] = []  # of each kind: a layer, and a die
        numbers: dict[Hashable, int] = {}
        profiles: dict[tuple[int, ...], int] = {}  # kinds by die, as some layers have them
        self._profile_of: dict[int, int] = {}  # by layer
        for layer, of_dies in kinds.items():
            for die, kind in enumerate(of_dies):
                if numbers.setdefault(kind, len(numbers)) == len(self._examples):
                    self._examples.append((layer, die))
            here = tuple(numbers[kind] for kind in of_dies)
            self._profile_of[layer] = profiles.setdefault(here, len(profiles))
        self._profiles = np.array(list(profiles), np.int64)
        self._known: dict[tuple[int, ...], int] = {}  # by kind, rows in all, for a copy, of a domain

    def of(self, layers: Sequence[int], received: Ns, copied: Ns, num_tokens: Ns) -> Ns:
        """Return the time in ns of each die for its rows `received`, both [layers, domains, dies].

        copied [domains, dies] is how many of the rows are for a copy of the shared expert. num_tokens
        [domains] is how many tokens the domain's rows are copies of.
        """
        if not layers:
            return received
        most, base = int(copied.max(initial=0)) + 1, int(received.max(initial=0)) + 1
        num_domains = len(num_tokens)
        kinds = self._profiles[[self._profile_of[layer] for layer in layers]]
        cases = (kinds[:, None] * most + copied) * num_domains + np.arange(num_domains)[:, None]
        keys = cases * base + received
        few = np.unique(keys)
        prices = np.zeros(len(few), np.int64)
        for place, key in enumerate(few.tolist()):
            rest, count = divmod(key, base)
            rest, domain = divmod(rest, num_domains)
            kind, shared = divmod(rest, most)
            if count:
                prices[place] = self._price(kind, shared, count, int(num_tokens[domain]))
        return prices[np.searchsorted(few, keys)]

    def _price(self, kind: int, shared: int, count: int, num_tokens: int) -> int:
        """Return the time in ns for `count` rows, `shared` of them for a copy of the shared expert."""
        key, known = (kind, count, shared, num_tokens), self._known
        if key not in known:
            if len(known) >= MAX_KEPT:
                known.clear()
            billed = self.billed(count - shared, num_tokens)
            known[key] = round(self._price_of(*self._examples[kind], count - shared, shared, billed))
        return known[key]

    def billed(self, num_routed: int, num_tokens: int) -> float:
        """Return the token copies to bill to a die that has received `num_routed` copies of some tokens."""
        return self._spec.billed_copies(num_routed, num_tokens * self._top_k / self._num_holders)
