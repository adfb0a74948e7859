"""Table 3, and where each number comes from."""

import pytest

from xdeepserve.errors import InputError
from xdeepserve.hw.accelerators import ACCELERATORS, Accelerator, accelerator

SOURCES = ("MS ", "CM ", "XDS ", "DS ", "public", "fitted", "assumed", "half of INT8")


@pytest.mark.parametrize("device", ACCELERATORS.values(), ids=list(ACCELERATORS))
def test_every_number_has_a_source(device: Accelerator) -> None:
    own = [device.price, device.network, device.tp_link, *([device.power] if device.power else [])]
    params = own + [getattr(device.spec, name) for name in device.spec.__struct_fields__]
    assert all(param.source.startswith(SOURCES) for param in params)


def test_a_gpu_has_three_numbers_of_table_3_its_cards_and_assumes_the_others() -> None:
    spec = ACCELERATORS["h20"].spec
    published = [
        name for name in spec.__struct_fields__ if not getattr(spec, name).source.startswith("assumed")
    ]
    assert published == ["bf16_peak", "hbm_bytes", "hbm_bandwidth", "roce_bandwidth"]
    assert ACCELERATORS["h20"].per_cost() == pytest.approx((51.9, 2214.1, 80.0), rel=1e-3)


def test_unknown_hardware_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown hardware 'h21': known are l20, .*did you mean h20\?"):
        accelerator("h21")
