"""`bench eaas`: the loss of one of many servers costs little once it is known, and no bits."""

import pytest

from xdeepserve.bench import eaas


@pytest.mark.campaign
def test_one_of_many_servers_is_lost() -> None:
    rows = {row.name.rpartition("/")[2]: row.value for row in eaas._lost_in_the_pod()}
    assert 0 < rows["until_found"] < rows["last_token_later"] + 5
    assert rows["last_token_later"] > 0
    assert -2 < rows["drop_once_found"] < 2  # what is lost is replaced, at the paper's bound
