"""Prices of experts on dies of their own in virtual time, by the rows received."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.hw.spec import Spec

Ns = npt.NDArray[np.int64]
MAX_KEPT = 1 << 12  # prices that are kept


class ExpertPrices:
    """Prices of the dies of `programs` in `layers` with experts, which are passes of a step.

    Dies of one kind in a layer take equally long for equal rows.
    """

    def __init__(
        self, programs: Sequence[ExpertProgram], layers: Sequence[int], top_k: int, spec: Spec
    ) -> None:
        self._top_k, self._spec = top_k, spec
        self._examples: list[tuple[ExpertProgram, int]] = []  # of each kind: a die, and a layer's number
        profiles: dict[tuple[int, ...], int] = {}  # kinds by die, as some layers have them
        kinds: dict[tuple[object, ...], int] = {}
        self._profile_of: dict[int, int] = {}  # by layer
        for number, layer in enumerate(layers):
            kinds_here = tuple(self._find(kinds, program, number) for program in programs)
            self._profile_of[layer] = profiles.setdefault(kinds_here, len(profiles))
        self._profiles = np.array(list(profiles), np.int64).reshape(len(profiles), len(programs))
        self._known: dict[tuple[int, ...], int] = {}  # by kind, rows in all, for a copy, of a domain

    def _find(self, kinds: dict[tuple[object, ...], int], program: ExpertProgram, number: int) -> int:
        """Return a die's kind: the experts that it holds in a layer, and which matrices are in floating
        point."""
        held = program.layers[number]
        mlps = (mlp for mlp in (held.experts, held.shared) if mlp is not None)
        kept = [linear.scale is None for mlp in mlps for linear in (mlp.w13, mlp.w2)]
        kind = kinds.setdefault((program.mem.is_shared, len(program.mem.slots), *kept), len(kinds))
        if kind == len(self._examples):
            self._examples.append((program, number))
        return kind

    def of(self, layers: Sequence[int], received: Ns, copied: Ns, num_tokens: Ns) -> Ns:
        """Return the time in ns of each die for its rows `received`, both [layers, domains, dies].

        copied [domains, dies] is how many of the rows are for a copy of the shared expert. num_tokens
        [domains] is how many tokens the domain's rows are copies of.
        """
        most, base = int(copied.max(initial=0)) + 1, int(received.max(initial=0)) + 1
        num_domains = len(num_tokens)
        cases = (self._profiles[:, None] * most + copied) * num_domains + np.arange(num_domains)[:, None]
        few, case = np.unique(cases, return_inverse=True)  # of kind, rows for a copy, and domain
        profile_of = [self._profile_of[layer] for layer in layers]
        keys = case.reshape(cases.shape)[profile_of] * base + received
        prices = np.zeros(len(few) * base, np.int64)
        for key in np.flatnonzero(np.bincount(keys.reshape(-1))).tolist():
            number, count = divmod(key, base)
            if count:
                rest, domain = divmod(int(few[number]), num_domains)
                prices[key] = self._price(*divmod(rest, most), count, int(num_tokens[domain]))
        return prices[keys]

    def _price(self, kind: int, shared: int, count: int, num_tokens: int) -> int:
        """Return the time in ns for `count` rows, `shared` of them for a copy of the shared expert."""
        key, known = (kind, count, shared, num_tokens), self._known
        if key not in known:
            if len(known) >= MAX_KEPT:
                known.clear()
            program, number = self._examples[kind]
            mean = num_tokens * self._top_k / program.mem.placed.num_primary_dies
            billed = self._spec.billed_copies(count - shared, mean)
            known[key] = round(program.price(count - shared, shared, billed, number))
        return known[key]
