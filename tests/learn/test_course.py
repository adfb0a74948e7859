"""Every exercise: its skeleton fails, the package's function passes, and plausible mistakes are placed."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest

from tests.samples import ROOT, agree
from xdeepserve.cli import main
from xdeepserve.learn.course import COURSE, exercise_of
from xdeepserve.learn.exercise import Exercise
from xdeepserve.learn.stand_in import NotYetError
from xdeepserve.learn.trial import try_file

QUANTISED = "k.quantize_rows(q, scale, x)"
ONE_SCALE = "scale[:] = np.abs(x).max(initial=1e-12) / np.float32(127); q[:] = np.rint(x / scale[:, None])"
SCALED = "F32 = np.float32; top = np.abs(x).max(axis=1, initial=1e-12); scale[:] = top / F32(127); q[:] = "
WITHOUT_FLOOR = (
    "scale[:] = np.abs(x).max(axis=1, initial=0) / np.float32(127); "
    "q[:] = np.rint(np.divide(x, scale[:, None], out=np.zeros_like(x), where=scale[:, None] > 0))"
)

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
    "mla_absorption": [
        ("latent[at],", "np.flip(latent[at], 0),", r"output, position 1, head \d, value \d+: expected"),
        ("layer.w_uk)", "layer.w_uk * F32(1.001))", r"output, position \d, head \d, value \d+: expected"),
        ("if self.is_int8:", "if False:", r"output, position \d, head \d+, value \d+: expected"),
    ],
    "group_gating": [
        ("best[..., 0] + best[..., 1] if", "best[..., 0] if", r"topk_idx, token \d+, slot \d: expected"),
        ("take_along_axis(scores,", "take_along_axis(choice,", "topk_weights, token 0, slot 0: expected"),
        ("np.where(is_open[..., None], grouped, F32(-np.inf))", "grouped", r"topk_idx, token \d+, slot"),
    ],
    "int8_tokens": [
        (QUANTISED, ONE_SCALE, r"rank 2: scale, token 0: expected 7.87\d+e-15"),
        (QUANTISED, f"{QUANTISED}; q[:] = (x / scale[:, None]).astype(np.int8)", "rank 2: q, token 1, col"),
        (QUANTISED, WITHOUT_FLOOR, r"rank 2: scale, token 0: expected 7.87\d+e-15 .*, yours is 0.0"),
    ],
    "copy_on_write": [
        ("self._users[new] = 1", "pass", r"users, slot \d+: expected 1, yours is 0"),
        ("self._drop_user(old)", "pass", r"users, slot \d+: expected \d, yours is \d"),
        ('"hbm", old, "hbm", new', '"hbm", new, "hbm", old', r"the copy, item 1: expected \d+, yours is \d+"),
    ],
    "mtp_acceptance": [
        ("break", "continue", r"rank 0: accepted drafts, sequence \d: expected \d, yours is \d"),
        ("draft - 1", "draft", r"rank 0: accepted drafts, sequence \d: expected"),
        ("range(stop -", "range(stop + 1 -", r"rank 0: accepted drafts, sequence \d: expected"),
    ],
    "kv_handoff": [
        (
            "target.address.plus(dst_done)",
            "target.address",
            r"copy \d+, of source.* 1, of node, offset: value 1",
        ),
        (
            "dst_idx, dst_done = dst_idx + 1, 0",
            "dst_idx += 1",
            r"09_kv_handoff.py, line \d+ in pair: IndexError",
        ),
        (
            "nbytes = min(source.nbytes - src_done, ",
            "nbytes = max(source.nbytes - src_done, ",
            r"copies, copy 0",
        ),
    ],
    "trampoline": [
        (
            "range(expert_rank,",
            "range(0,",
            "rank 1: attention ranks of expert rank 1, item 0: expected 1, yours is 0",
        ),
        (
            ", self.experts.num_ranks)",
            ", 1)",
            "attention ranks of expert rank 0, item 1: expected 2, yours is 1",
        ),
        (
            "list(range(expert_rank, len(self.attention), self.experts.num_ranks))",
            "[expert_rank]",
            "expected 2 of them",
        ),
    ],
    "eplb_placement": [
        ("has_room & ~is_on[expert]", "has_room", r"replicas, die \d, slot \d: expected \d+, yours is \d+"),
        ("(-share[e], e)", "e", r"replicas, die \d, slot \d: expected \d+, yours is \d+"),
        ("load[die] += share[expert]", "pass", r"replicas, die \d, slot \d: expected \d+, yours is \d+"),
    ],
    "rollback_rows": [
        ("n >= step", "n > step", "blocks: expected 2 of them"),
        ("n >= step", "n >= 0", "its step 3, rank 0: blocks: expected 0 of them"),
        ("reverse=True", "reverse=False", "rows, block 0, column 0: expected 1.0"),
    ],
}
# What no short run meets, and calls by hand do.
RARE_MISTAKES = (
    (
        "copy_on_write",
        "if not self.is_shared(holding, block_idx):",
        "if self._users[old] == 1:",
        "yours is None",
    ),
    (
        "mtp_acceptance",
        "sampled[at]",
        "sampled[(draft - 1) % len(sampled)]",
        "call 17: accepted drafts, sequence 1",
    ),
    ("eplb_placement", "min(swaps)", "min(swaps, key=lambda swap: swap[0])", r"call 2\d: replicas, die"),
    ("eplb_placement", "not is_on[expert, taken]", "primary[expert] != taken", r"call 2\d: replicas, die"),
    (
        "dispatch_counts",
        "        order = chosen[order]",
        "        pass",
        "order, row 0: expected 1, yours is 0",
    ),
    ("dispatch_counts", "if counts.max() > layout.rows_per_block:", "if False:", "expected AddressError"),
    (
        "dispatch_counts",
        "raise AddressError(",
        "raise ValueError(",
        r"expected AddressError .*, yours: .*ValueError",
    ),
    (
        "dispatch_counts",
        "np.ascontiguousarray(payload)",
        "payload.astype(np.int8)",
        "in pack_tokens: ValueError",
    ),
    (
        "group_gating",
        'np.argsort(-masked, axis=-1, kind="stable")',
        "np.lexsort((-np.arange(masked.shape[1])[None].repeat(len(masked), 0), -masked), axis=-1)",
        "topk_idx, token 0, slot 0: expected 0, yours is",
    ),
    ("group_gating", "(total + GATE_EPS)", "total", "topk_weights, token 0, slot 0: expected"),
    (
        "group_gating",
        "return topk_idx.astype(np.int32), weights *",
        "return topk_idx.astype(np.int32), weights if not norm_topk_prob else weights *",
        "topk_weights, token 0",
    ),
    ("copy_on_write", "self._take_slot()", "self._free.pop()", r"line \d+ in copy: IndexError"),
    (
        "kv_handoff",
        "if total != room:",
        "if False:",
        "expected AddressError .the source has 64 bytes|IndexError",
    ),
    (
        "kv_handoff",
        'check_alignment("source", src)',
        "pass",
        r"expected AddressError .*source span of \d+ bytes",
    ),
    ("kv_handoff", "check_overlaps(src, dst)", "pass", "expected AddressError .*overlaps"),
    ("eplb_placement", "_base(base, len(free))", "_base((), len(free))", "replicas, die"),
    ("eplb_placement", "1 + np.bincount", "2 * np.bincount", "replicas|division|warning|divide"),
    (
        "rollback_rows",
        "    return rows",
        "    overwritten.clear()\n    return rows",
        "it changes what it is given",
    ),
    (
        "rollback_rows",
        "sorted((n for n in overwritten if n >= step), reverse=True)",
        "reversed([n for n in overwritten if n >= step])",
        "rows, block",
    ),
    (
        "rollback_rows",
        "sorted((n for n in overwritten if n >= step), reverse=True)",
        "[n for n in overwritten if n >= step]",
        "rows, block",
    ),
    ("kv_handoff", 'check_alignment("destination", dst)', "pass", "expected AddressError .*destination span"),
    ("combine_order", "np.zeros((slot_out", "-np.zeros((slot_out", "sum, token 0, column 0: expected 0.0"),
    ("int8_tokens", QUANTISED, f"{SCALED}np.floor(x / scale[:, None] + F32(0.5))", "q, token 0, column"),
    ("int8_tokens", QUANTISED, f"{SCALED}np.rint(x * (1 / scale)[:, None])", r"q, token \d, column"),
    ("int8_tokens", QUANTISED, f"{SCALED}np.rint(127 * x.astype(float) / top[:, None])", "q, token"),
    ("mla_absorption", "if self.is_int8:", "if True:", "output, position 0, head 0, value 0: expected"),
    (
        "mla_absorption",
        "at in enumerate(seen)",
        "at in enumerate(map(slice, range(1, 99)[: len(q)]))",
        "output",
    ),
    (
        "mla_absorption",
        "np.ascontiguousarray(o).reshape(len(q), -1)",
        "o",
        r"layout: expected .float32 \[13, 256\], contiguous., yours is .float32 \[13, 8, 32\], not cont",
    ),
)


def rewritten(exercise: Exercise, old: str = "", new: str = "") -> str:
    """The package's own function as a learner could have written it, perhaps with a mistake."""
    source = textwrap.dedent(inspect.getsource(exercise.own)).replace("@kernel\n", "")
    assert old in source
    module = exercise.owner.partition(":")[0]
    names = f"globals().update((k, v) for k, v in vars(home).items() if k != {exercise.name!r})"
    return f"from __future__ import annotations\nimport {module} as home\n{names}\n{source.replace(old, new)}"


def checked(exercise: Exercise, text: str, folder: Path) -> int:
    """How often the function in `text` was called, if all is equal."""
    path = folder / f"{exercise.stem}.py"
    path.write_text(text)
    return try_file(exercise, path)


def test_the_page_shows_what_a_check_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"(?:^    .*\n)+", (ROOT / "docs" / "learn.md").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "start", "2"]) == 0
    old, new, _ = MISTAKES["dispatch_counts"][-1]
    next(Path("learn").glob("02*.py")).write_text(rewritten(exercise_of(2), old, new))
    capsys.readouterr()
    assert main(["learn", "check", "2"]) == 1
    assert agree(textwrap.dedent(shown), capsys.readouterr().out)


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


@pytest.mark.parametrize(("slug", "old", "new", "message"), RARE_MISTAKES)
def test_a_rare_mistake_is_found(slug: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    (exercise,) = [each for each in COURSE if each.slug == slug]
    with pytest.raises(NotYetError, match=message) as caught:
        checked(exercise, rewritten(exercise, old, new), tmp_path)
    assert str(caught.value).startswith(exercise.where)


@pytest.mark.parametrize(
    ("slug", "mistake", "given"),
    [
        ("ring_tail", 1, "base=8, first=0, stop=1, num_cores=3"),
        ("kv_handoff", 0, "src=[Span(address=Address(node=0, offset=0), nbytes=96), Span("),
        ("int8_tokens", 0, "x=float32 [5, 32]"),
        ("copy_on_write", 1, "block_idx=0"),
        ("rollback_rows", 2, "overwritten=dict with keys [3, 4, 5], step=4"),
    ],
)
def test_what_a_call_was_given_is_said(slug: str, mistake: int, given: str, tmp_path: Path) -> None:
    (exercise,) = [each for each in COURSE if each.slug == slug]
    with pytest.raises(NotYetError) as caught:
        checked(exercise, rewritten(exercise, *MISTAKES[slug][mistake][:2]), tmp_path)
    assert caught.value.given.startswith(given)
    assert "\n" not in caught.value.given


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
