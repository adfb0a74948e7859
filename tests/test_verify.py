"""The bit-exactness matrix: which rows there are for a model."""

from collections import Counter

import msgspec
import pytest

from xdeepserve.engine.deployment import PRESETS, resolve
from xdeepserve.engine.sizes import fit
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.verify import Case, cases, left_out


def combination(case: Case, config: ModelConfig) -> tuple[str, int, int]:
    """What a case is once it is fitted: deployment, drafts, microbatches of the TE that decodes."""
    decode = fit(resolve(case.deployment, case.overrides), config)[-1]
    return case.deployment, decode.mtp, decode.num_microbatches


@pytest.mark.parametrize("model", ["tiny", "tiny-random", "tiny-r1"])
def test_every_deployment_with_and_without_mtp_in_one_and_two_microbatches(model: str) -> None:
    """For every deployment that the model allows; `monolithic` has no microbatches."""
    config = resolve_model(model).config
    names = PRESETS if config.n_routed_experts >= 256 else PRESETS[:-1]
    wanted = {
        (name, mtp, microbatches)
        for name in names
        for mtp in (0, 1)
        for microbatches in ((1,) if name == "monolithic" else (1, 2))
    }
    assert not wanted - {combination(case, config) for case in cases(config)}


@pytest.mark.parametrize("model", ["tiny", "tiny-r1"])
def test_rows_are_told_apart_by_their_names(model: str) -> None:
    rows = cases(resolve_model(model).config)
    counts = Counter((case.deployment, case.variant) for case in rows)
    assert not [row for row, count in counts.items() if count > 1]
    ways = Counter(msgspec.structs.replace(case, variant="") for case in rows)
    assert not [way for way, count in ways.items() if count > 1]


def test_deployments_without_rows_say_why() -> None:
    config = resolve_model("tiny").config
    assert left_out(config) == {"superpod": "not for this model: 256 routed experts needed"}
    assert not left_out(resolve_model("tiny-r1").config)
    dense = msgspec.structs.replace(config, first_k_dense_replace=99, num_nextn_predict_layers=0)
    assert left_out(dense)["moe-attention"] == "not for this model: routed experts needed"
