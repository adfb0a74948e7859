"""Reads experts for replicas from the checkpoint, in the packed form that dies hold."""

from __future__ import annotations

from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe, TensorSource, iter_expert, weight_specs


class ExpertStorage:
    """Reads routed experts of the layers that a TE uses."""

    def __init__(self, source: TensorSource, recipe: Recipe, experts: ExpertSizes) -> None:
        self.config: ModelConfig = source.config
        self._source, self._recipe = source, recipe
        self.layers = list(experts.layers)  # those with experts
        self._specs = weight_specs(source.config, recipe, 1)

    def read(self, number: int, expert: int) -> list[Array]:
        """Return the packed arrays of an expert of MoE layer `number`, in the order of a slot's arrays."""
        arrays = {
            name: self._specs[name].pack(array)
            for name, _, array in iter_expert(self._source, self._recipe, self.layers[number], expert)
        }
        return [arrays[name] for name in self._specs if name in arrays]
