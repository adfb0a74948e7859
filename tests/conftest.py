import functools
import math
import os
import time

# Quantisation multiplies many small matrices: on a busy machine a second BLAS thread only waits for a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# After every turn of every TE, here and in the processes that tests start; deployments that modules make when
# they are imported ask for this, too.
os.environ["XDEEPSERVE_INVARIANTS"] = "1"

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import breaches, long_tests
from xdeepserve.model import presets, seeded
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

# A busy machine is slow, not wrong.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# Without it only asserts of `test_*` files show the values they compare, and those of shared tools do not.
pytest.register_assert_rewrite(
    *(f"tests.{room.parent.name}" for room in Path(__file__).parent.glob("*/__init__.py"))
)

ENDS_AT = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=int, default=1, metavar="N", help="of each test's cases run one in N")
    parser.addoption(
        "--for-s", type=float, metavar="S", help="begin no test after S seconds: skip what is left"
    )
    parser.addoption("--find-long", action="store_true", help=f"write {long_tests.FILE.name} anew")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    thin(items)
    if not config.getoption("--find-long") and all(os.path.isdir(each) for each in config.args):
        long_tests.leave_out(items)  # who asks for some file's tests wants all of them
    result = yield  # `-m` chooses
    keep_share(config, items)
    return result


def thin(items: list[pytest.Item]) -> None:
    """Of the cases of tests marked `thin(n)` leave all but one in n to the campaign; to `make long`, if the
    others are of `make test` however long they take.

    Not every nth: with as many values of a parameter that would be always the same one.
    """
    of_test = Counter[str]()
    for item in items:
        if marker := item.get_closest_marker("thin"):
            test = item.nodeid.partition("[")[0]
            number, n = of_test[test], marker.args[0]
            if (number + number // n) % n and not item.get_closest_marker("campaign"):
                is_always = item.get_closest_marker("always")
                item.add_marker(pytest.mark.long if is_always else pytest.mark.campaign)
            of_test[test] += 1


def keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every Nth case of each test, the first always: a campaign that ends in a fraction of the time."""
    share = config.getoption("--share")
    if share < 1:
        raise pytest.UsageError(f"--share is 1 or more, not {share}")
    of_test = Counter[str]()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left if of_test[test] % share else kept).append(item)
        of_test[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--find-long"):
        stats = terminalreporter.stats
        long_tests.write(each for kind in ("", "passed", "failed") for each in stats.get(kind, []))


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--for-s")
    config.stash[ENDS_AT] = math.inf if seconds is None else time.monotonic() + seconds


def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ["XDEEPSERVE_INVARIANTS"] = "0" if item.get_closest_marker("idle") else "1"  # speed
    if time.monotonic() > item.config.stash[ENDS_AT]:
        pytest.skip("time is up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    forbid_breaches(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    forbid_breaches(item)


def forbid_breaches(item: pytest.Item) -> None:
    """Fail a test in which an invariant was broken, or not checked, whatever the test itself has caught."""
    marks = {str(kind) for mark in item.iter_markers("invariants") for kind in mark.args}
    if found := breaches.take(frozenset(marks | ({"off"} if item.get_closest_marker("idle") else set()))):
        pytest.fail("; ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _breaches_are_noted() -> Iterator[None]:
    with breaches.noted():
        yield


@pytest.fixture(scope="session", autouse=True)
def _tensors_of_seeds_are_computed_once() -> Iterator[None]:
    """A worker's tests build some thousand engines of the same few seeded models."""
    compute = functools.lru_cache(4096)(seeded.normal_tensor)
    with pytest.MonkeyPatch.context() as patch:
        for module in (seeded, presets):
            patch.setattr(module, "normal_tensor", lambda *what, **how: compute(*what, **how).copy())
        yield


@pytest.fixture(scope="session")
def tiny() -> TinyCheckpoint:
    """The seeded preset: tests of bits rest on weights that training does not change."""
    checkpoint = resolve_model("tiny-random")
    assert isinstance(checkpoint, TinyCheckpoint)
    return checkpoint


@pytest.fixture(scope="session")
def tiny_config(tiny: TinyCheckpoint) -> ModelConfig:
    return tiny.config
