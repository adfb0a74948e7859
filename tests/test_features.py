"""The table of features and modes: it is what the checks say, and every cell that says yes serves."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.lockstep import GREEDY, PROMPTS
from xdeepserve.llm import LLM, digest
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.verify.features import MODES, Cell, cells

ROOT = Path(__file__).parent.parent
CELLS = list(cells(resolve_model("tiny-random").config))


def test_the_page_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "features.md"
    subprocess.run([sys.executable, ROOT / "tools" / "write_features.py", file], check=True)
    with capsys.disabled():
        print("\n".join(line for line in file.read_text().splitlines() if line.startswith("|")))
    assert file.read_text() == (ROOT / "docs" / "features.md").read_text(), "run tools/write_features.py"


def test_every_cell_has_a_way_or_a_reason(tiny_config: ModelConfig) -> None:
    """No feature is refused everywhere, and no reason is an accident."""
    names = {cell.feature.name for cell in CELLS}
    assert {cell.feature.name for cell in CELLS if not cell.reason} == names
    assert len(CELLS) == len(names) * len(MODES)
    assert not [cell for cell in CELLS if "must be" in cell.reason or "unknown setting" in cell.reason]


def named(cell: Cell) -> str:
    return f"{cell.mode.name}: {cell.feature.name}"


@functools.cache
def expected(*arithmetic: str) -> str:
    with LLM("tiny-random", "monolithic", overrides=["max_model_len=64", *arithmetic]) as llm:
        return digest(llm.generate(PROMPTS, GREEDY, keep_logits=True))


@pytest.mark.campaign
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.reason], ids=named)
def test_what_goes_together_serves(cell: Cell) -> None:
    mode = cell.mode
    settings = ["max_model_len=64", *cell.overrides]
    with LLM("tiny-random", mode.deployment, overrides=settings, timing_only=mode.is_timing_only) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, keep_logits=not mode.is_timing_only)
        llm.engine.check_integrity()
    assert all(len(output.outputs[0].token_ids) == GREEDY.max_tokens for output in outputs)
    if not mode.is_timing_only:
        assert digest(outputs) == expected(*{"combine=int8"} & set(cell.overrides))
