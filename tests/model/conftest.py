import pytest

from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint, resolve_model


@pytest.fixture(scope="session")
def tiny() -> TinyCheckpoint:
    checkpoint = resolve_model("tiny")
    assert isinstance(checkpoint, TinyCheckpoint)
    return checkpoint


@pytest.fixture(scope="session")
def tiny_config(tiny: TinyCheckpoint) -> ModelConfig:
    return tiny.config
