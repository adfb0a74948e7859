"""Fine-tuning: every example once an epoch; and, where the train extra is there, a model that has learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from xdeepserve.errors import InputError
from xdeepserve.jobs import training
from xdeepserve.jobs.job_records import JobOrder, TrainingSettings
from xdeepserve.jobs.task_process import TaskSpec
from xdeepserve.jobs.task_work import TASKS, TRAINING_KINDS
from xdeepserve.jobs.training import batches
from xdeepserve.model.presets import resolve_model

SETTINGS = TrainingSettings(n_epochs=2, batch_size=4, learning_rate_multiplier=10)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_every_example_is_there_once_an_epoch(count: int) -> None:
    steps = list(batches(count, SETTINGS))
    assert steps == list(batches(count, SETTINGS)), "drawn by a seed"
    assert sorted(each for some in steps for each in some) == sorted([*range(count)] * 2)
    assert max(map(len, steps)) == min(count, 4)


def test_without_the_extra_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(InputError, match=r"^fine-tuning needs torch and transformers: pip install"):
        training.check_extra()


def test_a_model_learns_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the train extra")
    pytest.importorskip("transformers", reason="the train extra")
    line = json.dumps({"prompt": "Who are you?", "completion": " I am the virtual SuperPod."})
    (tmp_path / "lines").write_text("\n".join([line] * 20))
    order = JobOrder(model="tiny", source="tiny", training=1, training_settings=SETTINGS)
    source, written = resolve_model("tiny"), []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        found: dict[str, Any] = {}
        for kind in TRAINING_KINDS[:-1]:
            spec = TaskSpec(kind, order, str(tmp_path / folder), str(tmp_path / "lines"))
            found[kind] = TASKS[kind](spec, lambda what, data: None)
        perplexity = found["evaluate"]["perplexity"]
        assert perplexity["trained"] < perplexity["original"] / 2
        written.append((spec.model / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    names = [sorted(path.name for path in each.iterdir()) for each in (source.directory, spec.model)]
    assert set(names[0]) - set(names[1]) == {"answer_lengths.npy", "evaluation.json", "training.json"}
    before = load_file(source.directory / "model.safetensors")
    after = load_file(spec.model / "model.safetensors")
    assert {name: each.dtype for name, each in after.items()} == {
        name: each.dtype for name, each in before.items()
    }
    drafts = [name for name in before if name.startswith("model.layers.4.")]
    assert drafts
    assert all((after[name] == before[name]).all() for name in drafts), "MTP's layer stays"
