"""The command `xdeepserve learn`: list, start and check the exercises of the course, and give hints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.learn.exercise import Exercise
    from xdeepserve.learn.working_folder import WorkingFolder

EPILOG = """\
list      all exercises, and how far you are
start N   write the skeleton of a function of the package, and its story, into the working folder
check [N] run yours in the place of the package's own, inside the pod; exit 0 passed, 1 not yet
hint [N]  the next hint

Without N: the first exercise in the folder that is not solved yet.
"""


def add_options(parser: Parser) -> None:
    """Add the options of the command: the action, the exercise's number and the working folder."""
    parser.add_argument("action", choices=("list", "start", "check", "hint"), help="see below")
    parser.add_argument("number", type=int, nargs="?", metavar="N", help="an exercise, by its number")
    parser.add_argument(
        "--dir", type=Path, default=Path("learn"), metavar="DIR", help="the working folder; default learn"
    )
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """List, start, check or give a hint; return 1 if a check is not passed yet."""
    from xdeepserve.errors import InputError
    from xdeepserve.learn.course import COURSE, exercise_of
    from xdeepserve.learn.working_folder import WorkingFolder

    folder = WorkingFolder(args.dir)
    if args.action == "list":
        if args.number is not None:
            raise InputError(f"list takes no number: xdeepserve learn start {args.number} begins with it")
        for each in COURSE:
            print(f"{each.number:>2}  {each.title:<42} {each.section:<38} {folder.state(each)}".rstrip())
        return 0
    if args.action == "start":
        if args.number is None:
            raise InputError("start which? xdeepserve learn list has the numbers")
        story, skeleton = folder.start(exercise_of(args.number))
        print(f"read {story}\nthen write the function in {skeleton}")
        print(f"and try it: xdeepserve learn check {args.number}{_dir(args)}")
        return 0
    exercise = exercise_of(args.number) if args.number is not None else _current(folder)
    if args.action == "hint":
        number, text, is_new = folder.next_hint(exercise)
        again = "" if is_new else ", there are no more"
        print(f"exercise {exercise.number}, hint {number} of {len(exercise.hints)}{again}: {text}")
        return 0
    return _check(args, folder, exercise)


def _check(args: argparse.Namespace, folder: WorkingFolder, exercise: Exercise) -> int:
    from xdeepserve.errors import InputError
    from xdeepserve.learn.trial_process import check_apart
    from xdeepserve.learn.working_folder import digest_of

    source = folder.source(exercise)
    if not source.is_file():
        raise InputError(
            f"{args.dir / source.name}: no such file; begin with xdeepserve learn start {exercise.number}"
        )
    digest = digest_of(source)
    with working(f"learn: exercise {exercise.number} (the first check compiles kernels)"):
        verdict = check_apart(exercise, source)
    if not verdict.is_passed:
        print(f"exercise {exercise.number}, {exercise.title}: not yet\n  {verdict.text}")
        if verdict.given:
            print(f"  it was given {verdict.given}")
        return 1
    folder.passed(exercise, digest)
    calls = f"{verdict.num_calls} call{'s' * (verdict.num_calls != 1)}"
    print(f"exercise {exercise.number}, {exercise.title}: passed, {calls}, every bit equal")
    print(f"  the package's own is {exercise.solution}")
    return 0


def _current(folder: WorkingFolder) -> Exercise:
    """Find the first exercise started and not solved by the learner."""
    from xdeepserve.errors import InputError
    from xdeepserve.learn.course import COURSE

    for exercise in COURSE:
        if folder.state(exercise) in ("started", "changed since"):
            return exercise
    raise InputError(
        f"no exercise in {folder.path} is under way: xdeepserve learn start N begins one (see learn list)"
    )


def _dir(args: argparse.Namespace) -> str:
    return "" if args.dir == Path("learn") else f" --dir {args.dir}"
