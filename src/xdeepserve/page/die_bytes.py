"""Read a die's memory for the page: its regions by name, and a region's first bytes with their meaning.

Only fields and rows of a protocol have a meaning. Looking costs no virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from xdeepserve.comm.cells import Cells, members
from xdeepserve.engine.run.wiring import ByteWiring
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.ways.trampolines.real import Trampolines
from xdeepserve.errors import RequestError, abridged

SHOWN_BYTES = 512
SHOWN_CELLS = 8
SHOWN_ELEMENTS = 4  # of a member that is an array


class RegionRow(msgspec.Struct, frozen=True, array_like=True):
    """A region of a memory's three areas, with its offset and length in bytes."""

    area: str
    name: str
    offset: int
    nbytes: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of a field or row: its name, type and offset, and its value in each cell shown."""

    name: str
    type: str
    offset: int
    values: list[str]


class DieBytes(msgspec.Struct, frozen=True):
    """Either the regions of a die, or the first bytes of a region in hexadecimal digits, with its members."""

    die: int
    place: str
    regions: list[RegionRow] = []
    region: RegionRow | None = None
    hex: str = ""
    axes: str = ""
    item_nbytes: int = 0
    members: list[Member] = []


def die_bytes(engine: Engine, die: int, region: str | None) -> DieBytes:
    """Read the regions of a die, or the first bytes of `region`.

    RequestError if the die has no memory now, or its memory has no such region.
    """
    pod = engine.plan.pod
    if die not in pod.dies or not pod.memories.is_materialised(die):
        raise RequestError(f"die {die} has no memory in this pod now", param="die")
    if die in pod.memories.silent:
        raise RequestError(f"die {die} is lost: its memory does not answer", param="die")
    rows = [
        RegionRow(area.name, each.name, each.offset, each.nbytes)
        for area in pod.memories.plans[die].areas
        for each in area.regions.values()
    ]
    place = pod.topology.name(die)
    if region is None:
        return DieBytes(die, place, rows)
    row = next((row for row in rows if row.name == region), None)
    if row is None:
        raise RequestError(f"die {die} has no region {abridged(region)}", param="region")
    memory, cells = pod.memory(die), cells_of(engine, die).get(region)
    data = bytes(memory.read(row.offset, min(row.nbytes, SHOWN_BYTES))).hex()
    if cells is None:
        return DieBytes(die, place, region=row, hex=data)
    shown = min(SHOWN_CELLS, row.nbytes // cells.dtype.itemsize)
    return DieBytes(
        die,
        place,
        region=row,
        hex=data,
        axes=" × ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in cells.dims),
        item_nbytes=cells.dtype.itemsize,
        members=[*_members(cells, bytes(memory.read(row.offset, shown * cells.dtype.itemsize)))],
    )


def _members(cells: Cells, data: bytes) -> Iterator[Member]:
    array = np.frombuffer(data, cells.dtype)
    if cells.dtype.names is None:
        yield Member("", str(cells.dtype), 0, [_text(each) for each in array])
    for name, (dtype, offset) in members(cells.dtype).items():
        shape = f"[{dtype.shape[0]}]" if dtype.shape else ""
        yield Member(name, f"{dtype.base}{shape}", offset, [_text(each) for each in array[name]])


def _text(value: Any) -> str:
    if getattr(value, "shape", ()):
        more = " ..." if len(value) > SHOWN_ELEMENTS else ""
        return " ".join(_text(each) for each in value[:SHOWN_ELEMENTS]) + more
    return f"{value:.6g}" if value.dtype.kind == "f" else str(value)


def cells_of(engine: Engine, die: int) -> dict[str, Cells]:
    """Map the regions of a die's exchanges to their cells, by name."""
    te = next((te.plan for te in engine.je.tes if die in te.plan.every_die), None)
    if te is None or not isinstance(te.wiring, ByteWiring):
        return {}
    away = te.wiring.away
    apart = chain.from_iterable(away.a2e) if isinstance(away, Trampolines) else ()
    layouts = (*apart, *(among.layout for among in te.wiring.among), *te.wiring.collectives)
    return {region: cells for layout in layouts for region, cells in layout.cells().items()}
