"""Ray, an optional extra: a local cluster started here, or an existing cluster, and tasks on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from xdeepserve.errors import InputError, XDeepServeError

LOCAL = "local"
T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def connected(address: str, num_cpus: int) -> Iterator[Any]:
    """Connect to the Ray cluster at `address`, or start one on the loopback for "local", with `num_cpus`
    CPUs. A started cluster ends with this process.

    Raises InputError without Ray, and XDeepServeError if there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it says nothing to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its future default, or it warns
    try:
        import ray
    except ImportError:
        raise InputError("a cluster needs Ray: pip install '.[ray]'") from None
    of_own: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        ray.init(address, logging_level="error", **(of_own if address == LOCAL else {}))
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise XDeepServeError(f"no Ray cluster at {address}: {why}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def over(address: str, function: Callable[[T], R], todo: Sequence[T], num_cpus: int | None) -> Iterator[R]:
    """Compute function(each) on the nodes of a cluster, and yield results in the order of `todo` as soon as
    they are there. Work that a lost node had begun is begun again elsewhere.

    Raises XDeepServeError if the cluster fails; errors of the function are raised unchanged.
    """
    with connected(address, num_cpus or os.cpu_count() or 1) as ray:
        task = ray.remote(function)
        results = [task.remote(each) for each in todo]
        for result in results:
            try:
                yield ray.get(result)
            except ray.exceptions.RayTaskError as error:
                raise error.cause or error from None
            except ray.exceptions.RayError as error:
                raise XDeepServeError(f"the cluster has lost a task: {error}") from None
