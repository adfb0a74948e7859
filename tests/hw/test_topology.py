"""The pod's shape: numbers, names, planes and distances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import DeploymentError, HardwareError
from xdeepserve.hw.topology import Plane, Topology

POD = Topology()


def test_a_cloudmatrix384_has_768_dies() -> None:
    assert POD.num_dies == 768
    assert POD.servers * POD.chips_per_server == 384


@given(st.integers(0, 767))
def test_a_location_tells_its_die(die: int) -> None:
    server, chip, place = location = POD.locate(die)
    assert (server * 8 + chip) * 2 + place == die
    assert POD.server_of(die) == location.server


def test_names() -> None:
    assert POD.name(0) == "s00.c0.d0"
    assert POD.name(767) == "s47.c7.d1"
    assert POD.name(POD.host(3)) == "s03.host"


def test_planes() -> None:
    host = POD.host(0)
    POD.check_path(0, host, Plane.UB)
    POD.check_path(0, 100, Plane.ROCE)
    POD.check_path(host, POD.host(2), Plane.VPC)
    with pytest.raises(HardwareError, match=r"s00\.host is not on the ROCE plane"):
        POD.check_path(0, host, Plane.ROCE)
    with pytest.raises(HardwareError, match=r"s00\.c0\.d0 is not on the VPC plane"):
        POD.check_path(0, host, Plane.VPC)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(HardwareError, match="node 816 does not exist"):
        POD.name(816)
    with pytest.raises(HardwareError, match="server 48 does not exist"):
        POD.host(48)
    with pytest.raises(HardwareError, match="is a host"):
        POD.locate(POD.host(0))
    with pytest.raises(DeploymentError, match="servers must be at least 1"):
        Topology(servers=0)
