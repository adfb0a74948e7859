"""The KV cache in a die's memory: what a layer's blocks are made of, and where each block's pieces lie.

Everything that a block has lies in these parts, so it moves, is swapped, cached and evicted as one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.deploy.sizes import KVSizes
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.plans import PoolPlace
from xdeepserve.hw.memory import Address, Area, Region
from xdeepserve.model.cache_layout import TILE, cache_shape, cache_width
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.families import AttentionKind
from xdeepserve.model.weights import Recipe
from xdeepserve.step.frame import KVCache


class CachePart(NamedTuple):
    """One array of a layer's cache, all blocks of it; `name` is the field of KVCache."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_blocks: int

    @property
    def block_nbytes(self) -> int:
        """Size of each KV block in this array, in bytes; blocks lie one after the other."""
        return math.prod(self.shape) * self.dtype.itemsize // self.num_blocks


@functools.lru_cache(maxsize=16)
def cache_parts(
    c: ModelConfig, recipe: Recipe, num_blocks: int, block_size: int, kind: AttentionKind
) -> tuple[CachePart, ...]:
    """Return the parts of a layer's cache: latents, or values, with their scales in INT8; RoPE keys, or whole
    keys; the keys of its indexer, if it has one.

    A block has those of all its heads. Each layer of hundreds of dies asks, and most get the same answer.
    """
    if c.v4 is not None:
        return _v4_parts(c, recipe, num_blocks, block_size, kind)
    is_int8, by_head, f32 = recipe == "int8", num_blocks * c.num_key_value_heads, np.dtype(np.float32)
    shapes = {
        "latent": cache_shape(by_head, block_size, c.value_columns),
        "scale": (by_head, block_size) if is_int8 else (0, 0),
        "k_pe": cache_shape(by_head, block_size, c.key_columns),
    }
    if kind == "dsa":
        shapes["index_k"] = (num_blocks, block_size // TILE, c.index_head_dim, TILE)
    dtypes = {"latent": np.dtype(np.uint8)} if is_int8 else {}
    return tuple(CachePart(name, dtypes.get(name, f32), shape, num_blocks) for name, shape in shapes.items())


def _v4_parts(
    c: ModelConfig, recipe: Recipe, num_blocks: int, block_size: int, kind: AttentionKind
) -> tuple[CachePart, ...]:
    """Return the parts of a layer's cache of DeepSeek-V4: latents of all positions; entries, each in the
    block of its window's last position, and what positions give to them."""
    assert c.v4 is not None
    is_int8, f32, rate = recipe == "int8", np.dtype(np.float32), c.v4.rate(kind)
    values = np.dtype(np.int8) if is_int8 else f32
    rank, turned = cache_width(c.kv_lora_rank), c.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "latent": (block_size, rank),
        "scale": (block_size,),
        "k_pe": (block_size, turned),
    }
    if rate:
        overlap, entries = 2 if kind == "csa" else 1, -(-block_size // rate)
        entries = -(-entries // 8) * 8  # pieces are moved by 32 bytes, for which INT8 columns are padded, too
        shapes |= {
            "open": (block_size, 2 * overlap * c.v_head_dim),
            "entry": (entries, rank),
            "entry_scale": (entries,),
            "entry_pe": (entries, turned),
        }
    if kind == "csa":
        shapes |= {
            "index_open": (block_size, 4 * c.index_head_dim),
            "index_entry": (entries, c.index_head_dim),
        }
    return tuple(
        CachePart(
            name,
            values if name in ("latent", "entry") else f32,
            (num_blocks, *shape) if is_int8 or not name.endswith("scale") else (0, 0),
            num_blocks,
        )
        for name, shape in shapes.items()
    )


class KVMemory:
    """The KV blocks of one die, in its HBM and in slots of its host's memory.

    Each layer of the model has its parts; each draft has a layer, too, even if one MTP layer makes them all.
    """

    def __init__(
        self, space: Workspace, config: ModelConfig, recipe: Recipe, sizes: KVSizes, num_drafts: int
    ) -> None:
        self.sizes = sizes
        self._space, self._config, self._recipe = space, config, recipe
        self._num_main, self._num_layers = config.num_hidden_layers, config.num_hidden_layers + num_drafts
        self._has_tail = num_drafts > 1
        self._host: Region | None = None

    def plan(self) -> None:
        """Reserve the blocks of all layers."""
        for layer in range(self._num_layers):
            for part in self._layer(layer):
                self._space.plan(f"kv/{layer}/{part.name}", part.dtype, *part.shape)
        if self._has_tail:
            self._space.plan("kv/tail", np.float32, self.sizes.num_blocks, self._config.hidden_size)

    def plan_host(self, area: Area, die: int) -> None:
        """Reserve the die's host slots, each a whole block, in a host's memory."""
        self._host = area.alloc(f"kv of rank {die}", self.sizes.num_host_blocks * self.block_nbytes)

    @property
    def host_regions(self) -> list[Region]:
        """The slots in the host's memory, if there are any."""
        return [] if self._host is None else [self._host]

    def _layer(self, layer: int) -> tuple[CachePart, ...]:
        c, sizes = self._config, self.sizes
        return cache_parts(c, self._recipe, sizes.num_blocks, sizes.block_size, c.attention_of(layer))

    @property
    def parts_by_layer(self) -> list[list[tuple[str, int]]]:
        """Buffers with a piece of each KV block, and the piece's bytes, in the same order on all dies.

        A list for each layer of the main model, and a last one, which may be empty, for what MTP keeps.
        """
        parts = [self._pieces(layer) for layer in range(self._num_main)]
        rest = [part for layer in range(self._num_main, self._num_layers) for part in self._pieces(layer)]
        if self._has_tail:
            rest.append(("kv/tail", self._config.hidden_size * 4))
        return [*parts, rest]

    def _pieces(self, layer: int) -> list[tuple[str, int]]:
        return [
            (f"kv/{layer}/{part.name}", part.block_nbytes) for part in self._layer(layer) if part.block_nbytes
        ]

    @property
    def block_parts(self) -> list[tuple[str, int]]:
        """Pieces of all layers in one list, in the order of `parts_by_layer`."""
        return [part for parts in self.parts_by_layer for part in parts]

    @property
    def num_parts(self) -> int:
        """Number of lists in `parts_by_layer`."""
        return self._num_main + 1

    @property
    def block_nbytes(self) -> int:
        """Size of a KV block over all layers, in bytes."""
        return sum(nbytes for _, nbytes in self.block_parts)

    @property
    def piece_weight(self) -> float:
        """Bytes of KV that each byte of a piece stands for: one, but in time-only runs."""
        return 1.0

    def block_pieces(self, tier: str, slot: int | PoolPlace) -> list[tuple[Address, int]]:
        """List addresses and sizes of a KV block's pieces in HBM, in host DRAM or in the memory pool.

        A pool value stores each part of all its blocks together, block after block. Parts that consist of
        positions are therefore the same bytes for every block size.
        """
        if isinstance(slot, PoolPlace):
            pieces, offset = [], 0
            for _, nbytes in self.block_parts:
                pieces.append((slot.address.plus(offset + slot.block * nbytes), nbytes))
                offset += slot.num_blocks * nbytes
            return pieces
        if tier == "hbm":
            return [
                (self._space.address(name).plus(slot * nbytes), nbytes) for name, nbytes in self.block_parts
            ]
        assert self._host is not None
        pieces, offset = [], slot * self.block_nbytes
        for _, nbytes in self.block_parts:
            pieces.append((self._host.address.plus(offset), nbytes))
            offset += nbytes
        return pieces

    def layer_pieces(self, slots: Sequence[int]) -> list[list[tuple[Address, int]]]:
        """List addresses and sizes of KV blocks' pieces in HBM: a list per layer, as in `parts_by_layer`.

        Each list goes through `slots` in order, with all pieces of a slot together.
        """
        return [
            [
                (self._space.address(name).plus(slot * nbytes), nbytes)
                for slot in slots
                for name, nbytes in parts
            ]
            for parts in self.parts_by_layer
        ]

    def slots_at(self, start: int, stop: int) -> set[int]:
        """Return the HBM slots of which some bytes lie in [start, stop) of the die's memory."""
        slots: set[int] = set()
        for name, nbytes in self.block_parts:
            at = self._space.address(name).offset
            slots.update(range(max(0, (start - at) // nbytes), -(-(stop - at) // nbytes)))
        return {slot for slot in slots if slot < self.sizes.num_blocks}

    @property
    def tail(self) -> Array:
        """Hidden rows that the first MTP layer made of the last row in each block, float32 [blocks, H].

        The second draft may have to go on from there in the next step (engine/die/drafts.py).
        """
        return self._space.take("kv/tail", self.sizes.num_blocks, self._config.hidden_size)

    def caches(self) -> list[KVCache]:
        """Views of the blocks: one for each layer, then one for each draft."""

        def take(layer: int, part: CachePart) -> Array:
            return self._space.take(f"kv/{layer}/{part.name}", *part.shape)

        return [
            KVCache(**{part.name: take(layer, part) for part in self._layer(layer)})
            for layer in range(self._num_layers)
        ]
