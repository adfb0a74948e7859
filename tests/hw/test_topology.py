"""The pod's shape: numbers, names, planes and distances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import DeploymentError, HardwareError
from xdeepserve.hw.topology import Distance, Location, Plane, Topology

POD = Topology()


def test_a_cloudmatrix384_has_768_dies() -> None:
    assert POD.num_dies == 768
    assert POD.servers * POD.chips_per_server == 384
    assert POD.servers * POD.cpus_per_server == 192


@given(st.integers(0, 767))
def test_index_and_location_are_inverse(die: int) -> None:
    location = POD.locate(die)
    assert POD.index(location) == die
    assert POD.server_of(die) == location.server


def test_names() -> None:
    assert POD.name(0) == "s00.c0.d0"
    assert POD.name(767) == "s47.c7.d1"
    assert POD.name(POD.host(3)) == "s03.host"


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (4, 4, Distance.SAME_NODE),
        (4, 5, Distance.SAME_CHIP),
        (5, 6, Distance.SAME_SERVER),
        (0, 15, Distance.SAME_SERVER),
        (15, 16, Distance.INTER_SERVER),
        (3, POD.host(0), Distance.SAME_SERVER),
        (3, POD.host(1), Distance.INTER_SERVER),
    ],
)
def test_distance(a: int, b: int, distance: Distance) -> None:
    assert POD.distance(a, b) is distance
    assert POD.distance(b, a) is distance


def test_planes() -> None:
    host = POD.host(0)
    assert POD.check_path(0, host, Plane.UB) is Distance.SAME_SERVER
    assert POD.check_path(0, 100, Plane.ROCE) is Distance.INTER_SERVER
    assert POD.check_path(host, POD.host(2), Plane.VPC) is Distance.INTER_SERVER
    with pytest.raises(HardwareError, match=r"s00\.host is not on the ROCE plane"):
        POD.check_path(0, host, Plane.ROCE)
    with pytest.raises(HardwareError, match=r"s00\.c0\.d0 is not on the VPC plane"):
        POD.check_path(0, host, Plane.VPC)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(HardwareError, match="node 816 does not exist"):
        POD.name(816)
    with pytest.raises(HardwareError, match="server 48 does not exist"):
        POD.host(48)
    with pytest.raises(HardwareError, match="does not exist"):
        POD.index(Location(0, 8, 0))
    with pytest.raises(HardwareError, match="is a host"):
        POD.locate(POD.host(0))
    with pytest.raises(DeploymentError, match="servers must be at least 1"):
        Topology(servers=0)
