"""Policies by hand, and the prompt tree beside brute force."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.engine.balance.dp import LONG_PROMPT
from xdeepserve.engine.balance.heat_map import HeatMap, read_heat_map
from xdeepserve.engine.balance.prompt_tree import PromptTree
from xdeepserve.engine.balance.te_policies import Known, RoutedRequest, best, scores
from xdeepserve.errors import InputError

ASKED = RoutedRequest(number=0, num_tokens=1600, num_output=100)
HEAT = HeatMap(
    "here", (1, 1000), (1, 200), (1.0, 2.0), (((-1.0, -0.5), (0.2, 0.5)), ((-0.5, 0.1), (0.4, -0.9)))
)


def known(count: int = 3, **columns: list[float]) -> Known:
    names = {name: np.zeros(count) for name in Known._fields}
    for name, values in columns.items():
        names[name] = np.array(values, float)
    flags = {name: names[name].astype(bool) for name in ("has_long", "has_short", "is_apart")}
    return Known(**{**names, **flags})


def choice(
    policy: str, asked: RoutedRequest = ASKED, heat: HeatMap | None = None, **columns: list[float]
) -> int:
    facts = known(**columns)
    return best(scores(policy, asked, facts, heat), facts.sequences)


def test_turns_and_counts() -> None:
    assert [choice("round-robin", ASKED._replace(number=n)) for n in range(4)] == [0, 1, 2, 0]
    assert choice("sequences", sequences=[2, 1, 1]) == 1
    assert choice("load", queued=[5, 5, 7], sequences=[3, 2, 0]) == 1
    assert choice("prefix", cached=[16, 32, 32], sequences=[0, 3, 2]) == 2


def test_cost_is_waiting_and_computing() -> None:
    assert choice("cost", queued=[100, 50, 60]) == 1
    assert choice("cost", queued=[100, 50, 60], cached=[1000, 0, 0]) == 0
    assert choice("cost", queued=[5000, 50, 60], cached=[1000, 0, 0]) == 1
    # A long prompt goes where no short one is, whatever waits there.
    long = ASKED._replace(num_tokens=LONG_PROMPT)
    assert choice("cost", long, queued=[1, 1, 9e9], has_short=[1, 1, 0], has_long=[0, 0, 1]) == 2
    assert choice("cost", queued=[1, 1, 9e9], has_short=[0, 1, 1], has_long=[1, 1, 0]) == 2


def test_algorithm_1() -> None:
    """The kind of TE first; prefix where load is balanced, else load."""
    apart = [1.0, 0.0, 0.0]
    assert choice("deepserve", ASKED, HEAT, is_apart=apart) == 0  # long prompt, short answer
    assert choice("deepserve", ASKED._replace(num_output=500), HEAT, is_apart=apart) == 1
    assert choice("deepserve", ASKED._replace(num_tokens=10), HEAT, is_apart=apart) == 1
    assert choice("pd-aware", ASKED._replace(number=5, num_output=500), HEAT, is_apart=apart) == 2
    assert choice("deepserve", queued=[100, 101, 102], cached=[0, 0, 512]) == 2
    assert choice("deepserve", queued=[100, 101, 200], cached=[0, 0, 512]) == 0
    assert choice("deepserve", cached=[0, 0, 512]) == 2  # nobody has any load: that is balanced


def test_what_others_have_published() -> None:
    # 1600 new tokens and their blocks, or 800 new ones and 900 positions more of somebody else.
    assert choice("dynamo", cached=[0, 800, 0], positions=[0, 700, 100]) == 1
    assert choice("dynamo", cached=[0, 800, 0], positions=[0, 900, 100]) == 0
    # 3 x 0.5 of prefix against 2 x 1 of a queue that is empty; KV use breaks the tie.
    assert choice("llm-d", cached=[800, 0, 0], sequences=[4, 0, 0], kv_load=[0, 0.1, 0]) == 2
    assert choice("llm-d", cached=[1600, 0, 0], sequences=[4, 0, 0]) == 0


def test_the_first_of_equals() -> None:
    for policy in ("sequences", "load", "prefix", "cost", "deepserve", "dynamo", "llm-d"):
        assert choice(policy) == 0


def test_heat_maps(tmp_path: Path) -> None:
    assert HEAT.value(999, 199) == -1.5
    assert HEAT.value(10**6, 200) == pytest.approx(-0.4)
    assert HEAT.value(0, 0) == HEAT.value(1, 1)
    assert HEAT.stable == 0.5
    path = tmp_path / "map.json"
    path.write_bytes(msgspec.json.encode(HEAT))
    assert read_heat_map(path) == HEAT
    path.write_bytes(msgspec.json.encode(HEAT).replace(b"[1,1000]", b"[1000,1]"))
    with pytest.raises(InputError, match=r"heat map .*map.json: .* which rise"):
        read_heat_map(path)
    with pytest.raises(InputError, match="none: No such file"):
        read_heat_map(tmp_path / "none")


CHAINS = st.lists(st.integers(0, 3), max_size=6).map(
    lambda digits: tuple(int("1" + "".join(map(str, digits[: n + 1]))) for n in range(len(digits)))
)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), CHAINS), max_size=40),
    CHAINS,
)
def test_the_prompt_tree_is_brute_force(
    news: list[tuple[bool, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    tree, plain = PromptTree(), [set[int]() for _ in range(5)]
    for has, holder, blocks in news:
        (tree.publish if has else tree.evict)(holder, blocks)
        (plain[holder].update if has else plain[holder].difference_update)(blocks)
    expected = {}
    for holder, blocks_of in enumerate(plain):
        count = 0
        while count < len(asked) and asked[count] in blocks_of:
            count += 1
        if count:
            expected[holder] = count
    assert tree.match(asked) == expected
    assert len(tree) == len(set().union(*plain))
