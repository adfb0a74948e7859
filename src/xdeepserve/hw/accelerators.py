"""Accelerators for plans to choose from: MegaScale-Infer's Table 3, and the dies that this project simulates.

Each number has its source. What a paper or vendor does not say is `assumed`: above all how much of its peak
an accelerator reaches, for which that of a CloudMatrix384 die stands, to which it is fitted.
"""

from __future__ import annotations

import difflib

import msgspec

from ..errors import InputError
from .spec import Param, Spec
from .topology import Topology

# An Ascend 910B NPU of an Atlas 800T A2 server: where prefill may run beside a SuperPod (xDeepServe 5.1).
#
# A server has eight NPUs, each a package of its own with one die. They have no UB plane. Within a server each
# is linked with each other by HCCS, which takes the place of UB in `Spec`; to a SuperPod there are RoCE, by a
# card of each NPU, and VPC, by the server's card. What is not named here is as on a CloudMatrix384 die.

NPUS_PER_SERVER = 8
SERVER = Topology(servers=1, chips_per_server=NPUS_PER_SERVER, dies_per_chip=1)
_CORES = 20
_HCCS_BANDWIDTH = 28e9  # B/s, one way, of one link


def atlas_a2(num_npus: int) -> Spec:
    """Return the spec of an NPU in a server, when `num_npus` of its NPUs work together. Its bandwidth is that
    of the HCCS links to the others."""
    cm384 = Spec()
    share = _CORES / cm384.aic_cores.value
    by_cores = "assumed: that of a CloudMatrix384 die by number of cores; published figures"
    bandwidth = _HCCS_BANDWIDTH * max(1, num_npus - 1)
    return msgspec.structs.replace(
        cm384,
        aic_cores=Param(_CORES, "cores", "public: HAMi's table of devices, 910B3"),
        aiv_cores=Param(2 * _CORES, "cores", "public CANN notes: two for each AIC core"),
        int8_peak=Param(cm384.int8_peak.value * share, "op/s", f"{by_cores} lie between 512 and 640 T"),
        bf16_peak=Param(cm384.bf16_peak.value * share, "op/s", f"{by_cores} lie between 256 and 320 T"),
        vector_peak=Param(
            cm384.vector_peak.value * share,
            "op/s",
            "assumed: that of a CloudMatrix384 die by number of cores",
        ),
        hbm_bytes=Param(64 * 2**30, "B", "public: HAMi's table of devices, 910B3"),
        ub_bandwidth=Param(bandwidth, "B/s", "assumed: HCCS, one link to each other NPU, 28 GB/s one way"),
        exchange_copy=Param(
            cm384.exchange_copy.value * cm384.ub_bandwidth.value / bandwidth,
            "s",
            "assumed: as on UB, in proportion to the bandwidth",
        ),
    )


TABLE_3 = "MS Table 3"


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware of a device kind, with price and links, for the planner.

    price     of one, L20 = 1
    tp_link   bytes/s between devices of a server, one way
    power     at most, if it is published
    is_timed  whether timing-only runs of this project have such devices; else nothing can check a plan
    """

    name: str
    spec: Spec
    price: Param
    tp_link: Param
    power: Param | None = None
    is_timed: bool = False

    @property
    def network(self) -> Param:
        """Bandwidth of a device's share of the network cards in its server (bytes/s, one way)."""
        return self.spec.roce_bandwidth

    @property
    def hbm_nbytes(self) -> int:
        """Size of a device's memory in bytes."""
        return int(self.spec.hbm_bytes.value)

    def per_cost(self) -> tuple[float, float, float]:
        """Return the last columns of Table 3: GB, GB/s and TFLOPS for a price of 1."""
        s, price = self.spec, self.price.value
        return (
            self.hbm_nbytes / 1e9 / price,
            s.hbm_bandwidth.value / 1e9 / price,
            s.bf16_peak.value / 1e12 / price,
        )

    def ridge_batch(self) -> float:
        """Number of rows, at peak, from which a BF16 GEMM is bound by operations: F / B (MS 2.3)."""
        return self.spec.bf16_peak.value / self.spec.hbm_bandwidth.value


def _gpu(gb: float, gb_per_s: float, tflops: float, network: Param) -> Spec:
    """Build a GPU's spec from three numbers of Table 3 and its share of network cards. All other values are
    those of a CloudMatrix384 die, marked as assumed."""
    die = Spec()
    assumed = {
        name: Param(param.value, param.unit, f"assumed: as on a CloudMatrix384 die ({param.source})")
        for name in die.__struct_fields__
        for param in [getattr(die, name)]
    }
    assumed["int8_peak"] = Param(2e12 * tflops, "op/s", "assumed: twice BF16")
    return Spec(
        **assumed
        | {
            "hbm_bytes": Param(1e9 * gb, "B", TABLE_3),
            "hbm_bandwidth": Param(1e9 * gb_per_s, "B/s", TABLE_3),
            "bf16_peak": Param(1e12 * tflops, "op/s", TABLE_3),
            "roce_bandwidth": network,
        }
    )


def _price(value: float, source: str = TABLE_3) -> Param:
    return Param(value, "L20s", source)


def _rate(value: float, source: str) -> Param:
    return Param(value, "B/s", source)


_PCIE = _rate(32e9, "assumed: PCIe 4.0 x16, one way; MS 7.1 says PCIe of L40S")
_CARDS = "a server's cards over eight devices, which is assumed"

ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator(
            name="l20",
            spec=_gpu(48, 864, 119.5, _rate(12.5e9, "assumed: as L40S")),
            price=_price(1.00),
            tp_link=_PCIE,
        ),
        Accelerator(
            name="h800",
            spec=_gpu(80, 3430.4, 989, _rate(50e9, "assumed: 400 Gb/s for each device")),
            price=_price(5.28),
            tp_link=_rate(200e9, "public: NVLink of 400 GB/s, half of it one way"),
        ),
        Accelerator(
            name="a800",
            spec=_gpu(80, 2039, 312, _rate(25e9, "MS 7.1: eight cards of 200 Gb/s for eight devices")),
            price=_price(2.26),
            tp_link=_rate(200e9, "MS 7.1: NVLink of 400 GB/s, half of it one way"),
        ),
        Accelerator(
            name="h20",
            spec=_gpu(96, 4096, 148, _rate(25e9, f"MS 7.1: four cards of 400 Gb/s; {_CARDS}")),
            price=_price(1.85),
            tp_link=_rate(450e9, "MS 7.1: NVLink of 900 GB/s, half of it one way"),
            power=Param(500, "W", "MS 4.3"),
        ),
        Accelerator(
            name="l40s",
            spec=_gpu(48, 864, 362, _rate(12.5e9, f"MS 7.1: two cards of 400 Gb/s; {_CARDS}")),
            price=_price(1.08),
            tp_link=_PCIE,
            power=Param(350, "W", "MS 4.3"),
        ),
        Accelerator(
            name="cm384",
            spec=Spec(),
            price=_price(1.0, "assumed: no price is published; a plan on these dies alone needs none"),
            tp_link=Spec().ub_bandwidth,
            is_timed=True,
        ),
        Accelerator(
            name="910b",
            spec=atlas_a2(NPUS_PER_SERVER),
            price=_price(1.0, "assumed: no price is published"),
            tp_link=atlas_a2(NPUS_PER_SERVER).ub_bandwidth,
        ),
    )
}


ALIKE = {
    "h100": "h800 is the same chip with slower NVLink",
    "h200": "h800 is the same chip with less and slower memory (80 GB, 3.4 TB/s)",
    "a100": "a800 is the same chip with slower NVLink",
    "b200": "h800 is of the generation before it",
}


def accelerator(name: str) -> Accelerator:
    """Look up a device by name. Raises InputError with a suggestion if the name is unknown."""
    wanted = name.strip().lower()
    found = ACCELERATORS.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, ACCELERATORS, n=1, cutoff=0.3)
        hint = f"; {ALIKE[wanted]}" if wanted in ALIKE else f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown hardware '{name}': known are {', '.join(ACCELERATORS)}{hint}")
    return found
