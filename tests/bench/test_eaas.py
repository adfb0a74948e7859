"""`bench eaas`: the loss of one of many servers costs little once it is known, and no bits."""

from collections.abc import Iterator

import msgspec
import pytest

from xdeepserve.bench.papers import eaas, eaas_full_size
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same model with five layers."""

    def resolve(name: str) -> Checkpoint:
        model = resolve_model(name)
        model.config = msgspec.structs.replace(model.config, num_hidden_layers=5)
        return model

    monkeypatch.setattr(eaas_full_size, "resolve_model", resolve)
    eaas_full_size.halves.cache_clear()
    yield
    eaas_full_size.halves.cache_clear()


@pytest.mark.usefixtures("shallow")
def test_at_the_papers_size() -> None:
    rows = {row.name: row for row in eaas_full_size.rows()}
    assert 1.7 < rows["eaas/r1/scaling=32_to_64"].value < 2.2
    assert rows["eaas.save"].value > 34  # %: 42 of 64 GPUs with five layers, 36 with all; the paper: 40
    assert rows["eaas.fail"].value < 2
    hidden, waited = (rows[f"eaas/r1/balance/skew=0.6/microbatches={m}"].value for m in (2, 1))
    assert waited > 2 * hidden  # a second microbatch has the time that the hottest server takes
    name = "eaas/r1/double_batching/dies=64/requests=8192"
    fewer, more = (rows[each].value for each in ("eaas.abl.dbo", name))
    assert fewer < more < 50


@pytest.mark.campaign
def test_one_of_many_servers_is_lost() -> None:
    rows = {row.name.rpartition("/")[2]: row.value for row in eaas.lost_in_the_pod()}
    assert 0 < rows["until_found"] < rows["last_token_later"] + 5
    assert rows["last_token_later"] > 0
    assert -2 < rows["drop_once_found"] < 2  # what is lost is replaced, at the paper's bound
