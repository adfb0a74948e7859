"""Tools of the tests of chaos."""

from xdeepserve.chaos.campaign import Campaign, Trial
from xdeepserve.chaos.judge import Judge


def tried(judge: Judge, trials: list[Trial]) -> Campaign:
    result = Campaign(judge)
    result.run(trials, lambda trial, finding: None)
    return result
