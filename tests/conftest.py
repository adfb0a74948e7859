import os

# Quantisation multiplies many small matrices: on a busy machine a second BLAS thread only waits for a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tiny() -> TinyCheckpoint:
    """The seeded preset: tests of bits rest on weights that training does not change."""
    checkpoint = resolve_model("tiny-random")
    assert isinstance(checkpoint, TinyCheckpoint)
    return checkpoint


@pytest.fixture(scope="session")
def tiny_config(tiny: TinyCheckpoint) -> ModelConfig:
    return tiny.config
