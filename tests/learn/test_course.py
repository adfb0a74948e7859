"""Every exercise: its skeleton fails, the package's function passes, and plausible mistakes are placed."""

import inspect
import textwrap
from pathlib import Path

import pytest

from xdeepserve.learn.course import COURSE
from xdeepserve.learn.exercise import Exercise
from xdeepserve.learn.stand_in import NotYetError
from xdeepserve.learn.trial import try_file

# By exercise: what is written instead of what, in the package's own function, and what a learner reads then.
MISTAKES = {
    "ring_tail": [
        ("chunk + 1, base", "chunk, base", r"rank 0, peer 1: fields, field 0, .*: expected 1, yours is 0"),
        (
            "base + chunk + 1",
            "chunk + 1",
            r"rank 0, peer 1: fields, field \d, .*value 2: expected 9, yours is 1",
        ),
        ("max(first, stop - num_cores)", "first", r"rank [01], peer [01]: fields"),
    ],
    "dispatch_counts": [
        (
            'np.argsort(destination, kind="stable")',
            "np.arange(len(destination))",
            r"rank 0: order, row 0: expected",
        ),
        (
            "np.bincount(destination, minlength",
            "np.bincount(topk_idx.reshape(-1), minlength",
            r"rank 0: counts: expected int64 \[2\], yours is int64 \[8\]",
        ),
        (
            "token_idx, slot = np",
            "slot, token_idx = np",
            "rank 0: field token_idx, row 0: expected 0, yours is 2",
        ),
    ],
    "combine_order": [
        (
            "range(slot_out.shape[1])",
            "reversed(range(slot_out.shape[1]))",
            r"sum, token 1, column \d+: expected",
        ),
        ("slot_out[:, slot] *", "slot_out[:, slot].astype(np.float64) *", r"rank 0: sum, token \d+, column"),
        (" * topk_weights[:, slot, None]", "", r"rank 0: sum, token 1, column 0: expected"),
    ],
}


def rewritten(exercise: Exercise, old: str = "", new: str = "") -> str:
    """The package's own function as a learner could have written it, perhaps with a mistake."""
    source = textwrap.dedent(inspect.getsource(exercise.own))
    assert old in source
    module = exercise.owner.partition(":")[0]
    names = f"globals().update((k, v) for k, v in vars(home).items() if k != {exercise.name!r})"
    return f"from __future__ import annotations\nimport {module} as home\n{names}\n{source.replace(old, new)}"


def checked(exercise: Exercise, text: str, folder: Path) -> int:
    """How often the function in `text` was called, if all is equal."""
    path = folder / f"{exercise.stem}.py"
    path.write_text(text)
    return try_file(exercise, path)


COURSES = pytest.mark.parametrize("exercise", COURSE, ids=[each.slug for each in COURSE])


@COURSES
def test_a_skeleton_is_not_written_yet(exercise: Exercise, tmp_path: Path) -> None:
    with pytest.raises(
        NotYetError, match=rf"not written yet \({exercise.stem}.py, line \d+ in {exercise.name}\)"
    ):
        checked(exercise, exercise.skeleton, tmp_path)


@COURSES
def test_the_package_passes(exercise: Exercise, tmp_path: Path) -> None:
    own = exercise.own
    assert checked(exercise, rewritten(exercise), tmp_path) > 0
    assert exercise.own is own, "the package's own is back in its place"


@pytest.mark.parametrize(
    ("slug", "old", "new", "message"),
    [(slug, *mistake) for slug, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_is_placed(slug: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    (exercise,) = [each for each in COURSE if each.slug == slug]
    with pytest.raises(NotYetError, match=message) as caught:
        checked(exercise, rewritten(exercise, old, new), tmp_path)
    assert str(caught.value).startswith(exercise.where)
    assert "\n" not in str(caught.value)


def test_each_has_three_mistakes() -> None:
    assert {slug: len(mistakes) for slug, mistakes in MISTAKES.items()} == {each.slug: 3 for each in COURSE}


@COURSES
def test_stories_say_what_they_promise(exercise: Exercise) -> None:
    assert exercise.story.startswith(f"# {exercise.number}. ")
    for heading in ("## What must hold", "## Your task", "## What production systems do instead"):
        assert heading in exercise.story
    assert exercise.name in exercise.story
    assert max(map(len, exercise.story.splitlines())) <= 125
    assert 2 <= len(exercise.hints) <= 3


def test_numbers_are_in_order() -> None:
    assert [each.number for each in COURSE] == list(range(1, len(COURSE) + 1))


def test_a_skeleton_promises_what_the_package_does() -> None:
    for exercise in COURSE:
        theirs: dict[str, object] = {}
        exec(compile(exercise.skeleton, exercise.slug, "exec"), theirs)
        function = theirs[exercise.name]
        assert callable(function)
        names = [str(name) for name in inspect.signature(function).parameters]
        assert names == [str(name) for name in inspect.signature(exercise.own).parameters], exercise.slug


def test_what_is_given_stays_as_it_is(tmp_path: Path) -> None:
    (exercise,) = [each for each in COURSE if each.slug == "combine_order"]
    text = rewritten(exercise, "    total =", "    slot_out[:, 0] = 0\n    total =")
    with pytest.raises(
        NotYetError, match="rank 0: it changes what it is given: argument 0, axis 0 1, axis 1 0"
    ):
        checked(exercise, text, tmp_path)
