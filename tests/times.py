"""Virtual times between two commits: what happened when, in some forty histories, and where two runs part.

    python -m tests.times                  run all histories and compare them with the kept lines
    python -m tests.times pd-by-layer      run one
    python -m tests.times --write [NAME]   keep what happens now; the changelog must say why it changed

A history is a pod, requests, and what happens to them (task executors that come and go, dies that are lost,
glitches, aborts), all without a clock seed: with a seed, one more wait anywhere shuffles every later tie.
It is told in lines, sorted by time. Each line has numbers (instant, node, kind, ids) and, after a tab, words
(lane, name, arguments). `tests/golden/times.json` has two digests of each history: `times` of the numbers
alone, which renaming cannot change, and `words` of whole lines. The lines themselves are kept, compressed,
in `tests/golden/times/`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.engine.histories import abort_on_the_way
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Observed
from xdeepserve.history import History, TEChange, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.trace import Trace
from xdeepserve.llm import RequestOutput

DIGESTS = Path(__file__).parent / "golden" / "times.json"
LINES = DIGESTS.with_suffix("")
MS = 1000.0  # us

SMALL = ("max_model_len=128", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=32")
APART = ("attention.domains=2", "attention.dies=2", "experts.routed_dies=2", "experts.shared_dies=1")
PAIR = ("prefill.dies=2", "prefill.tp=2", "decode.dies=2")
EPLB = ("experts.redundant_slots=1", "experts.balance_interval=0.001")
SERVERS = (
    *("attention.dies=3", "experts.routed_dies=2", "experts.copies=1", "experts.vacancies=1"),
    *("services.heartbeat_ms=0.2", "services.answer_timeout_ms=2"),
)
SOON = ("health.suspect_s=0.01", "health.lost_s=0.05")
FAILOVER = (*SOON, "recovery.failover=true")
AHEAD = "execution.overlap=true"
POOL = ("ems.block_size=16", "ems.servers=2")  # a first batch of the same prompts fills the pool


class Line(NamedTuple):
    """Something that happened: numbers, of which the instant is the first, and words."""

    numbers: str
    words: str

    def __str__(self) -> str:
        return f"{self.numbers}\t{self.words}"


def _lost(die: int, at_us: float) -> Fault:
    return Fault(at_us, die, "lost")


GLITCHES = (
    Fault(2600.0, 0, "glitch", code="aicore-exception"),
    Fault(7700.0, 0, "glitch", code="mte-error"),
)
ONE_FOR_ANOTHER = (TEChange(1 * MS, "add", "both"), TEChange(4 * MS, "remove", "te"))
BOTH_SIDES = (
    TEChange(1 * MS, "add", "decode"),
    TEChange(2 * MS, "add", "prefill"),
    TEChange(3 * MS, "remove", "prefill 0"),
    TEChange(6 * MS, "drain", "decode 0"),
)

HISTORIES = {
    "monolithic": History("monolithic"),
    "monolithic-in-one-call": History("monolithic", ("lockstep=true", AHEAD, "mtp=1")),
    "monolithic-preempted": History("monolithic", ("cache.num_blocks=8", AHEAD)),
    "monolithic-swap": History(
        "monolithic",
        ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap"),
    ),
    "monolithic-bad-pages": History(
        "monolithic",
        (AHEAD,),
        faults=(
            Fault(900.0, 0, "bad-page", page="kv/0/latent"),
            Fault(2100.0, 0, "bad-page", page="weights/norm"),
        ),
    ),
    "monolithic-spare-die": History(
        "monolithic", (*FAILOVER, "recovery.spare_dies=1"), faults=(_lost(0, 900),)
    ),
    "colocated": History("colocated", ("dies=4", "mtp=2", "scheduler.dispatch=two-level")),
    "colocated-lockstep": History("colocated", ("dies=4", "lockstep=true", "mtp=2")),
    "colocated-time-only": History("colocated", ("dies=4", "mtp=1"), is_timing_only=True),
    "colocated-eplb": History("colocated", ("dies=4", AHEAD, *EPLB)),
    "colocated-push-lockstep": History("colocated", ("dies=4", "exchange=push", "lockstep=true", *EPLB)),
    "colocated-microbatches": History(
        "colocated", ("dies=2", "pipeline.microbatches=2", "execution.mode=op")
    ),
    "colocated-glitches": History("colocated", ("dies=2", AHEAD, "mtp=1"), faults=GLITCHES),
    "colocated-fewer-dies": History("colocated", ("dies=3", *FAILOVER), faults=(_lost(1, 900),)),
    "colocated-another-te": History("colocated", ("dies=2",), life=ONE_FOR_ANOTHER),
    "colocated-pool": History("colocated", (*POOL, "dies=2", "mtp=1")),
    "pd": History("pd", (*PAIR, "scheduler.job_executors=2", "scheduler.statuses=all-gather")),
    "pd-by-layer": History("pd", (*PAIR, "transfer=layer", "execution.decode.overlap=true", "mtp=1")),
    "pd-decode-lockstep": History("pd", (*PAIR, "lockstep=true")),
    "pd-few-blocks": History("pd", (*PAIR, "cache.num_blocks=8", "scheduler.admission=decode")),
    "pd-time-only": History("pd", (*PAIR, "prefill.tp_mode=sp-tp-sp"), is_timing_only=True),
    "pd-tes-replaced": History("pd", PAIR, life=BOTH_SIDES),
    "pd-losses": History(
        "pd",
        (*PAIR, "prefill.count=2", "decode.count=2", *SOON),
        faults=(_lost(1, 700), _lost(7, 3000)),
    ),
    "pd-makes-room": History(
        "pd",
        ("prefill.count=2", "prefill.dies=1", "decode.dies=1", *FAILOVER),
        faults=(_lost(2, 900),),
    ),
    "moe-attention": History("moe-attention", (*APART, AHEAD)),
    "moe-attention-lockstep": History("moe-attention", (*APART, "lockstep=true", "mtp=2")),
    "moe-attention-time-only": History("moe-attention", APART, is_timing_only=True),
    "moe-attention-expert-die": History("moe-attention", (*APART, *FAILOVER), faults=(_lost(5, 900),)),
    "dataflow": History("moe-attention", (*APART, "dataflow=true", "mtp=1")),
    "dataflow-glitches": History("moe-attention", (*APART, "dataflow=true"), faults=GLITCHES),
    "dataflow-time-only": History("moe-attention", (*APART, "dataflow=true"), is_timing_only=True),
    "m2n": History(
        "moe-attention",
        ("attention.hardware=h20", "experts.hardware=l40s", "attention.microbatches=3"),
    ),
    "eaas": History("eaas", SERVERS),
    "eaas-time-only": History("eaas", SERVERS, is_timing_only=True),
    "eaas-servers-change": History(
        "eaas",
        SERVERS,
        life=(TEChange(1 * MS, "add server", "te", 2), TEChange(1 * MS, "remove server", "te", 0)),
    ),
    "eaas-losses": History(
        "eaas",
        (*SERVERS, *SOON),
        faults=(_lost(4, 900), _lost(1, 2000)),
        life=(TEChange(4 * MS, "add server", "te", 1),),
    ),
    "transformerless": History(
        "transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "exchange=push")
    ),
    "transformerless-dataflow": History(
        "transformerless", (*APART, "dataflow=true", "execution.pin_cores=false")
    ),
    "transformerless-time-only": History("transformerless", (*APART, "mtp=1"), is_timing_only=True),
}


def asked() -> dict[str, Any]:
    """Seven prompts, which share beginnings in pairs, how each is continued, and when it arrives in ns."""
    lengths = (5, 33, 17, 64, 20, 1, 21)
    prompts = [
        [(7 + index // 2) % 11] * 16 + [(13 * index + i) % 100 for i in range(n)]
        for index, n in enumerate(lengths)
    ]
    params = [
        SamplingParams(
            max_tokens=3 + 2 * (index % 4),
            temperature=float(index % 3 == 1),
            seed=index,
            n=2 if index == 4 else 1,
            priority=-(index % 5 == 3),
            ignore_eos=True,
        )
        for index in range(len(lengths))
    ]
    arrivals = [0, 0, 0, 200_000, 200_000, 1_500_000, 9_000_000]
    return {"prompts": prompts, "params": params, "arrivals_ns": arrivals}


ABORTS = {3: 400_000, 6: 1_000_000}  # number of the request -> ns from when it is first scheduled


def tell(history: History) -> list[Line]:
    """Run a history, and tell it in lines sorted by time."""
    with tempfile.TemporaryDirectory() as directory:
        settings = (*SMALL, *history.settings)
        if {*POOL} <= {*settings}:
            settings = (f"ems.path={directory}", *settings)
        history = msgspec.structs.replace(history, settings=settings, **asked())
        for _ in range(2 if {*POOL} <= {*settings} else 1):
            told = serve(history, hears=(Observed,), around=_aborting, is_traced=True, may_fail=True)
    lines = [
        Line(f"{at_ns} -1 told {number} {_integers(event)}", f"{type(event).__name__} {_said(event)}")
        for number, (at_ns, event) in enumerate(told.events)
    ]
    lines += [*_traced(told.trace), *_came(told.outputs), Line(f"{told.end_ns} -1 end", "")]
    return sorted(lines, key=lambda line: (int(line.numbers.partition(" ")[0]), line))


def _aborting(llm: LLM) -> AbstractContextManager[None]:
    return nullcontext(abort_on_the_way(llm.engine, ABORTS))


def _traced(trace: Trace) -> list[Line]:
    lines = [
        Line(f"{s.start_ns} {s.node} span {s.end_ns}", f"{s.lane} | {s.name} | {_said(s.args or {})}")
        for s in trace.spans
    ]
    lines += [
        Line(f"{f.at_ns} {f.node} flow {f.to_node} {f.to_ns}", f"{f.name} | {f.lane} | {f.to_lane}")
        for f in trace.flows
    ]
    lines += [Line(f"{c.at_ns} {c.node} count {c.value:g}", c.name) for c in trace.counts]
    moved = Counter[tuple[int, int, str]]()
    for move in trace.moved:
        moved[move.source, move.target, move.plane] += move.nbytes
    return lines + [
        Line(f"0 {source} moved {target} {nbytes}", plane)
        for (source, target, plane), nbytes in moved.items()
    ]


def _came(outputs: Sequence[RequestOutput]) -> list[Line]:
    """What came of each request, at the time of its last token."""
    lines = []
    for index, output in enumerate(outputs):
        times = output.metrics
        cached = "" if times is None else f" {times.num_cached_tokens} cached"  # counted, and no event
        words = f"{[choice.finish_reason for choice in output.outputs]}{cached} {output.error or ''}"
        tokens = " ".join(",".join(map(str, choice.token_ids)) for choice in output.outputs)
        at = (
            "0 -1 came"
            if times is None
            else (
                f"{times.last_token_ns or 0} -1 came {index} {times.arrival_ns} {times.scheduled_ns} "
                f"{times.first_token_ns} {times.num_steps} {times.num_preemptions}"
            )
        )
        lines.append(Line(f"{at} {tokens}", words))
    return lines


def _integers(value: Any) -> str:
    """All integers of an event, in the order of its fields."""
    builtins = msgspec.to_builtins(value, enc_hook=str)
    return " ".join(str(int(each)) for each in _leaves(builtins) if isinstance(each, int))


def _said(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value, enc_hook=str), separators=(",", ":"))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


# ---- what is kept --------------------------------------------------------------------------------------


class Digests(msgspec.Struct, frozen=True):
    """What `times.json` says of a history."""

    times: str  # sha256 of the numbers
    words: str  # sha256 of whole lines
    num_lines: int
    end_us: float  # of virtual time


def digests(lines: Sequence[Line]) -> Digests:
    times = hashlib.sha256("\n".join(line.numbers for line in lines).encode()).hexdigest()
    words = hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
    end_ns = next(int(line.numbers.split()[0]) for line in lines if line.numbers.endswith("-1 end"))
    return Digests(times, words, len(lines), end_ns / 1000)


def kept_digests() -> dict[str, Digests]:
    return msgspec.json.decode(DIGESTS.read_bytes(), type=dict[str, Digests]) if DIGESTS.exists() else {}


def kept_lines(name: str) -> list[Line]:
    text = lzma.decompress((LINES / f"{name}.xz").read_bytes()).decode()
    return [Line(*line.split("\t", 1)) for line in text.split("\n")]


def keep(name: str, lines: Sequence[Line]) -> None:
    """Write a history's lines and digests."""
    LINES.mkdir(exist_ok=True)
    text = "\n".join(map(str, lines)).encode()
    (LINES / f"{name}.xz").write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    kept = {**kept_digests(), name: digests(lines)}
    ordered = {name: kept[name] for name in HISTORIES if name in kept}
    DIGESTS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def first_parting(kept: Sequence[Line], now: Sequence[Line]) -> str:
    """The first line in which two tellings differ, numbers before words, with the last three they share."""
    for what, differ in (
        ("times", lambda a, b: a is None or b is None or a.numbers != b.numbers),
        ("words", lambda a, b: a != b),
    ):
        for index, (old, new) in enumerate(zip_longest(kept, now)):
            if differ(old, new):
                shared = "".join(f"    = {line}\n" for line in now[max(0, index - 3) : index])
                return f"{what} part at line {index + 1}:\n{shared}    - {old}\n    + {new}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.times", description="Compare virtual times with those that are kept."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="histories; all by default")
    parser.add_argument("--write", action="store_true", help="keep what happens now")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in HISTORIES]:
        parser.error(f"no history is called {unknown[0]}; there are {', '.join(HISTORIES)}")
    kept, num_parted = kept_digests(), 0
    for name in args.names or HISTORIES:
        lines = tell(HISTORIES[name])
        if args.write:
            keep(name, lines)
        if name not in kept:
            verdict = "new"
        elif kept[name] == (now := digests(lines)):
            verdict = "equal"
        else:
            num_parted += 1
            verdict = "times differ" if now.times != kept[name].times else "words differ"
            if not args.write:
                verdict += "; " + first_parting(kept_lines(name), lines)
        print(f"{name:28} {len(lines):7,} lines {digests(lines).end_us:12,.1f} us  {verdict}", flush=True)
    return int(num_parted > 0 and not args.write)


if __name__ == "__main__":
    sys.exit(main())
