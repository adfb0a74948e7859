"""Lengths of answers, learned from the first half of a trace: what is alike, held out, told."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.platform.length_predictor import (
    ENOUGH,
    LengthPredictor,
    held_out_error,
    split,
    told_lengths,
)
from xdeepserve.platform.made_traffic import MadeTraffic, made, parsed
from xdeepserve.platform.traces import TracedRequest

APPLICATIONS = MadeTraffic(requests=2000, turns=1, systems=12, system=2000, output=300, spread=0.4, habit=1.2)


def requests(opening: int | None, prompt: int, outputs: list[int]) -> list[TracedRequest]:
    blocks = () if opening is None else (opening,)
    return [TracedRequest(0, prompt, output, blocks) for output in outputs]


def test_the_finest_group_with_enough_answers_decides() -> None:
    short, long = [10] * ENOUGH, [1000] * ENOUGH
    learned = requests(1, 600, short) + requests(1, 5000, long) + requests(None, 600, [50] * 3 * ENOUGH)
    predictor = LengthPredictor(learned)
    asked = {
        "opening and length": (requests(1, 700, [0])[0], 10),
        "the other length": (requests(1, 6000, [0])[0], 1000),
        "opening alone": (requests(1, 60_000, [0])[0], 505),
        "length alone": (requests(2, 700, [0])[0], 50),
        "nothing alike": (requests(None, 3, [0])[0], 50),
    }
    for name, (request, length) in asked.items():
        assert predictor(request) == length, name
    few = LengthPredictor(requests(1, 600, short[:-1]) + requests(2, 5000, long))
    assert few(requests(1, 600, [0])[0]) == np.median([10] * (ENOUGH - 1) + long), (
        "too few of a kind are none"
    )


def test_what_is_predicted_does_not_depend_on_the_answer_to_come() -> None:
    learned, held_out = split(made(APPLICATIONS))
    predictor = LengthPredictor(learned)
    for request in held_out[:100]:
        assert predictor(request) == predictor(request._replace(output_length=10**6))


def test_applications_with_habits_can_be_told_apart_and_others_cannot() -> None:
    errors = {}
    for habit in (0.0, APPLICATIONS.habit):
        learned, held_out = split(made(msgspec.structs.replace(APPLICATIONS, habit=habit)))
        assert max(each.at_ns for each in learned) < min(each.at_ns for each in held_out)
        errors[habit] = held_out_error(LengthPredictor(learned), learned, held_out)
    with_habits, without = errors[APPLICATIONS.habit], errors[0.0]
    assert with_habits.num == len(held_out) == 1000
    assert with_habits.mean_error < 0.6 * with_habits.mean_error_of_median
    assert with_habits.same_bucket > with_habits.same_bucket_of_median
    # Nothing to learn: no better than a median, and worse by the noise of small groups at most.
    assert 0.98 * without.mean_error_of_median < without.mean_error < 1.1 * without.mean_error_of_median


def test_a_habit_changes_answers_and_what_is_said_after_them_alone() -> None:
    plain, habits = (made(msgspec.structs.replace(APPLICATIONS, habit=habit)) for habit in (0.0, 1.2))
    assert [each.at_ns for each in plain] == [each.at_ns for each in habits]
    assert [each.input_length for each in plain] == [each.input_length for each in habits]
    assert [each.output_length for each in plain] != [each.output_length for each in habits]
    mean = np.mean([each.output_length for each in habits])
    assert 0.3 * 300 < mean < 3 * 300
    with pytest.raises(InputError, match="habit=1 is one of system prompts, and systems=0"):
        parsed("made:habit=1,systems=0")


def test_halves() -> None:
    at = [TracedRequest(ns, 1, 1, ()) for ns in (0, 5, 5, 5, 9)]
    assert [len(part) for part in split(at)] == [4, 1]
    for none in (at[:1], at[1:4], []):
        with pytest.raises(InputError, match="no two halves"):
            split(none)


def test_who_is_told_what() -> None:
    work = made(APPLICATIONS)
    for lengths, told in (("none", 0), ("told", work[0].output_length)):
        predict, error = told_lengths(lengths, work)  # type: ignore[arg-type]
        assert (predict(work[0]), error) == (told, None)
    predict, error = told_lengths("predicted", work)
    assert error is not None
    assert error.num == 1000
    assert predict(work[0]) == 0, "what is learned from is not told"
    assert predict(work[-1]) == LengthPredictor(split(work)[0])(work[-1])


def test_a_replay_says_how_far_its_predictions_are_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'model = "tiny"\npolicy = "deepserve"\nlengths = "predicted"\n[[te]]\ndies = 1\nmtp = 0\n'
    )
    trace = "made:requests=200,seconds=10,prompt=60,output=20,system=40,block=16,habit=1.5,spread=0.3"
    assert main(["replay", trace, "--cluster", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "on 100 held out" in found["lengths"]
    path.write_text(path.read_text().replace("predicted", "guessed"))
    assert main(["replay", trace, "--cluster", str(path)]) == 2
    assert "line 3: lengths must be one of " in capsys.readouterr().err
