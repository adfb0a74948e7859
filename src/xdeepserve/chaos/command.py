"""`xdeepserve chaos`: try faults by the hundred, and report what breaks."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.chaos.campaign import Campaign


def add_options(parser: Parser) -> None:
    """Add the options: the faults to try, and the deployments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--schedules", type=int, default=100, metavar="N", help="so many random schedules; default 100"
    )
    which.add_argument(
        "--every-step",
        action="store_true",
        help="instead, every single fault: each kind that is tried on a die at each operation of each step, "
        "each on a part of a memory pool at each phase",
    )
    which.add_argument(
        "--replay", type=Path, metavar="FILE", help="instead, one schedule, as --save wrote it"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first schedule; default 0")
    parser.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="of them the Kth, and every Nth from there: for N processes or computers side by side",
    )
    parser.add_argument(
        "--deployment", action="append", metavar="D", help="deployments to try; repeatable; default all"
    )
    parser.add_argument("--model", default="tiny-random", metavar="M", help="default tiny-random")
    parser.add_argument(
        "--save",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where failing schedules go, shrunk; default here",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _part(text: str) -> tuple[int, int]:
    """Parse K and N of "K/N"."""
    part, _, whole = text.partition("/")
    if not (part.isdecimal() and whole.isdecimal() and 1 <= int(part) <= int(whole)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return int(part), int(whole)


def run(args: argparse.Namespace) -> int:
    """Try faults; return 1 if a request was lost, hung or had other bits, or if something was left behind.

    Returns 130 after an interrupt from the keyboard, with the counts so far.
    """
    import msgspec

    from xdeepserve.chaos import campaign as c
    from xdeepserve.chaos.fault_schedule import read_schedule, write_schedule
    from xdeepserve.chaos.judge import Finding, Judge
    from xdeepserve.errors import InputError
    from xdeepserve.model.presets import resolve_model

    names = c.check_deployments(args.deployment or ())
    if args.schedules < 1:
        raise InputError(f"--schedules {args.schedules}: at least 1")
    replayed = None if args.replay is None else read_schedule(args.replay)
    try:
        args.save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save {args.save}: cannot be made: {error.strerror or error}") from None
    is_whole, begun = False, time.monotonic()
    with working("chaos") as status, Judge(resolve_model(args.model)) as judge:
        campaign = c.Campaign(judge)

        def report(trial: c.Trial, finding: Finding) -> None:
            if finding.is_bug:
                status.row(f"{finding.verdict}: {trial.schedule}: {finding.why}")
            status.detail = f"{campaign.tally.schedules}/{len(trials)}: {campaign.tally.equal} equal"

        with contextlib.suppress(KeyboardInterrupt):
            if replayed is not None:
                trials = [c.Trial(replayed, is_twice=True)]
            elif args.every_step:
                trials = c.step_trials(judge, names)
            else:
                trials = c.random_trials(judge, names, args.schedules, args.seed)
            (part, whole), count = args.part, len(trials)
            trials = trials[part - 1 :: whole]
            if not trials:
                raise InputError(f"--part {part}/{whole}: there is nothing in it, of {count} in all")
            campaign.run(trials, report)
            is_whole = True
    for number, (schedule, _) in enumerate(campaign.bugs):
        write_schedule(schedule, args.save / f"chaos-{number}.json")
    if args.json:
        print(json.dumps(msgspec.to_builtins(campaign.tally)))
    else:
        _print(campaign, args.save, time.monotonic() - begun)
    return 130 if not is_whole else 0 if campaign.tally.is_clean else 1


def _print(campaign: Campaign, where: Path, seconds: float) -> None:
    """Print the counts, by operation where there are operations, and the schedules that failed."""
    for (deployment, operation), count in sorted(campaign.by_operation.items()):
        print(f"{deployment:16} {operation or 'schedules':24} {count:6}")
    t = campaign.tally
    print(
        f"{t.schedules} schedules, {seconds / max(1, t.schedules):.2f} s each: {t.equal} with all bits equal "
        f"(recovered by stage {', '.join(f'{stage}: {num}' for stage, num in t.stages.items())}),\n"
        f"{t.named_errors} with an error that the faults permit and that names who "
        f"is lost; {t.hangs} hangs, {t.lost_requests} lost requests, {t.leaks} leaks, {t.wrong} wrong"
    )
    for number, (schedule, finding) in enumerate(campaign.bugs):
        print(f"{finding.verdict}: {schedule}: {finding.why}")
        print(f"  again: xdeepserve chaos --replay {where / f'chaos-{number}.json'}")
