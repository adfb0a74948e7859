"""Tools of the tests of the platform: prices and limits of steps, small traffic."""

from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.curve import Curve
from xdeepserve.prices.step_price import AttentionPrice, StepPrice

PRICE = StepPrice(
    num_groups=2,
    own=Curve((1.0, 64.0), (1e6, 9e6)),
    feed=Curve((1.0, 8.0, 128.0), (0.5e6, 2e6, 4e6)),
    attention=AttentionPrice(absorbed=300.0, plain=300.0, per_earlier=0.0, per_kv_token=400.0),
    gap=2e6,
)
LIMITS = StepLimits(num_seqs=8, num_rows=64, num_positions=4096, block=16)
TRAFFIC = MadeTraffic(
    requests=300, seconds=8, prompt=200, output=30, spread=0.7, system=64, block=16, pause=1
)
MADE = "made:requests=60,seconds=2,prompt=300,output=20,pause=1,system=64,block=16"


def small(seed: int = 0) -> list[TracedRequest]:
    return [
        each for each in made(MadeTraffic(**{**as_dict(TRAFFIC), "seed": seed}))  # type: ignore[arg-type]
        if each.input_length + each.output_length <= LIMITS.num_positions
    ]  # fmt: skip


def as_dict(traffic: MadeTraffic) -> dict[str, object]:
    return {name: getattr(traffic, name) for name in traffic.__struct_fields__}
