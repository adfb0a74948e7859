"""Schemathesis, from its own package, against a served `tiny`: bodies made of what /openapi.json says.

    python tools/clients/run_schemathesis.py                    25 bodies for each operation
    python tools/clients/run_schemathesis.py --examples 1000    more, and all that the schemas border on
    python tools/clients/run_schemathesis.py --open             a server that also takes jobs, files and TEs

Its environment is made as those of `run.py` are, and kept in `--work DIR`. Whatever it sends must be
answered, or refused with a status below 500, within `--timeout`; at the end no sequence is left, and no KV
block in use. An answer that fills the context takes five seconds of CPU: a busy machine needs longer.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from run import Client, install, served

FEW = 25
HELD = re.compile(
    r"^vllm:(kv_cache_usage_perc|num_requests_running|num_requests_waiting)\{.*\} (?P<value>.*)$"
)


def left_behind(metrics: str) -> list[str]:
    """Lines of /metrics that say what is still held."""
    lines = [found for line in metrics.splitlines() if (found := HELD.match(line))]
    assert len(lines) == 3, metrics
    return [found[0] for found in lines if float(found["value"])]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run schemathesis against a served model.")
    parser.add_argument("--work", type=Path, help="where the environment is kept")
    parser.add_argument("--examples", type=int, default=FEW, help=f"for each operation; default {FEW}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=60, help="seconds for each answer; default 60")
    parser.add_argument("--path", help="only the operations of this path")
    parser.add_argument("--open", action="store_true", help="also try what --state and --admin open")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        python = install(Client("", ("schemathesis",)), work.resolve() / "schemathesis")
        state = stack.enter_context(tempfile.TemporaryDirectory())
        base = stack.enter_context(served(*(("--state", state, "--admin") if args.open else ())))
        command = [python.parent / "schemathesis", "run", f"{base}/openapi.json", "--url", base]
        command += ["--checks", "not_a_server_error", "--max-examples", str(args.examples)]
        command += ["--phases", "fuzzing" if args.examples <= FEW else "examples,coverage,fuzzing"]
        command += ["--request-timeout", str(args.timeout), "--seed", str(args.seed)]
        command += ["--output-sanitize", "false"]  # nothing is secret, and a failure is to be sent again
        command += ["--include-path", args.path] if args.path else []
        command += ["--exclude-path", "/page/break"] if args.open else []  # a broken pod answers 503
        done = subprocess.run(command, cwd=work, check=False)  # where it leaves its reports
        with urllib.request.urlopen(f"{base}/metrics") as response:
            left = left_behind(response.read().decode())
    print("nothing is left behind" if not left else "\n".join(["left behind:", *left]))
    return 1 if done.returncode or left else 0


if __name__ == "__main__":
    sys.exit(main())
