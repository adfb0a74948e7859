"""An Ascend 910B NPU of an Atlas 800T A2 server: where prefill may run beside a SuperPod (xDeepServe 5.1).

A server has eight NPUs, each a package of its own with one die. They have no UB plane. Within a server each
is linked with each other by HCCS, which takes the place of UB in `Spec`; to a SuperPod there are RoCE, by a
card of each NPU, and VPC, by the server's card. What is not named here is as on a CloudMatrix384 die.
"""

from __future__ import annotations

import msgspec

from .spec import Param, Spec
from .topology import Topology

NPUS_PER_SERVER = 8
SERVER = Topology(servers=1, chips_per_server=NPUS_PER_SERVER, dies_per_chip=1)
_CORES = 20
_HCCS_BANDWIDTH = 28e9  # B/s, one way, of one link


def atlas_a2(num_npus: int) -> Spec:
    """One of `num_npus` NPUs that work together in a server, with as many links as lead to the others."""
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
