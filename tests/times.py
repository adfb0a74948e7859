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
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.engine.histories import abort_on_the_way
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Observed
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.trace import Trace
from xdeepserve.llm import RequestOutput
from xdeepserve.verify.case import TEChange
from xdeepserve.verify.outputs import change_tes

DIGESTS = Path(__file__).parent / "golden" / "times.json"
LINES = DIGESTS.with_suffix("")
MODEL = "tiny-random"
MS = 1_000_000  # ns

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


class History(NamedTuple):
    """A pod and what happens to its requests."""

    name: str
    deployment: str
    overrides: tuple[str, ...] = ()
    life: tuple[TEChange, ...] = ()  # task executors and expert servers that come and go
    faults: tuple[Fault, ...] = ()
    is_timing_only: bool = False
    has_pool: bool = False  # a memory pool on volumes, which a first batch of the same prompts fills


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

HISTORIES = (
    History("monolithic", "monolithic"),
    History("monolithic-in-one-call", "monolithic", ("lockstep=true", AHEAD, "mtp=1")),
    History("monolithic-preempted", "monolithic", ("cache.num_blocks=8", AHEAD)),
    History(
        "monolithic-swap",
        "monolithic",
        ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap"),
    ),
    History(
        "monolithic-bad-pages",
        "monolithic",
        (AHEAD,),
        faults=(
            Fault(900.0, 0, "bad-page", page="kv/0/latent"),
            Fault(2100.0, 0, "bad-page", page="weights/norm"),
        ),
    ),
    History(
        "monolithic-spare-die", "monolithic", (*FAILOVER, "recovery.spare_dies=1"), faults=(_lost(0, 900),)
    ),
    History("colocated", "colocated", ("dies=4", "mtp=2", "scheduler.dispatch=two-level")),
    History("colocated-lockstep", "colocated", ("dies=4", "lockstep=true", "mtp=2")),
    History("colocated-time-only", "colocated", ("dies=4", "mtp=1"), is_timing_only=True),
    History("colocated-eplb", "colocated", ("dies=4", AHEAD, *EPLB)),
    History("colocated-push-lockstep", "colocated", ("dies=4", "exchange=push", "lockstep=true", *EPLB)),
    History(
        "colocated-microbatches", "colocated", ("dies=2", "pipeline.microbatches=2", "execution.mode=op")
    ),
    History("colocated-glitches", "colocated", ("dies=2", AHEAD, "mtp=1"), faults=GLITCHES),
    History("colocated-fewer-dies", "colocated", ("dies=3", *FAILOVER), faults=(_lost(1, 900),)),
    History("colocated-another-te", "colocated", ("dies=2",), life=ONE_FOR_ANOTHER),
    History("colocated-pool", "colocated", ("dies=2", "mtp=1"), has_pool=True),
    History("pd", "pd", (*PAIR, "scheduler.job_executors=2", "scheduler.statuses=all-gather")),
    History("pd-by-layer", "pd", (*PAIR, "transfer=layer", "execution.decode.overlap=true", "mtp=1")),
    History("pd-decode-lockstep", "pd", (*PAIR, "lockstep=true")),
    History("pd-few-blocks", "pd", (*PAIR, "cache.num_blocks=8", "scheduler.admission=decode")),
    History("pd-time-only", "pd", (*PAIR, "prefill.tp_mode=sp-tp-sp"), is_timing_only=True),
    History("pd-tes-replaced", "pd", PAIR, life=BOTH_SIDES),
    History(
        "pd-losses",
        "pd",
        (*PAIR, "prefill.count=2", "decode.count=2", *SOON),
        faults=(_lost(1, 700), _lost(7, 3000)),
    ),
    History(
        "pd-makes-room",
        "pd",
        ("prefill.count=2", "prefill.dies=1", "decode.dies=1", *FAILOVER),
        faults=(_lost(2, 900),),
    ),
    History("moe-attention", "moe-attention", (*APART, AHEAD)),
    History("moe-attention-lockstep", "moe-attention", (*APART, "lockstep=true", "mtp=2")),
    History("moe-attention-time-only", "moe-attention", APART, is_timing_only=True),
    History("moe-attention-expert-die", "moe-attention", (*APART, *FAILOVER), faults=(_lost(5, 900),)),
    History("dataflow", "moe-attention", (*APART, "dataflow=true", "mtp=1")),
    History("dataflow-glitches", "moe-attention", (*APART, "dataflow=true"), faults=GLITCHES),
    History("dataflow-time-only", "moe-attention", (*APART, "dataflow=true"), is_timing_only=True),
    History(
        "m2n",
        "moe-attention",
        ("attention.hardware=h20", "experts.hardware=l40s", "attention.microbatches=3"),
    ),
    History("eaas", "eaas", SERVERS),
    History("eaas-time-only", "eaas", SERVERS, is_timing_only=True),
    History(
        "eaas-servers-change",
        "eaas",
        SERVERS,
        life=(TEChange(1 * MS, "add server", "te", 2), TEChange(1 * MS, "remove server", "te", 0)),
    ),
    History(
        "eaas-losses",
        "eaas",
        (*SERVERS, *SOON),
        faults=(_lost(4, 900), _lost(1, 2000)),
        life=(TEChange(4 * MS, "add server", "te", 1),),
    ),
    History(
        "transformerless", "transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "exchange=push")
    ),
    History(
        "transformerless-dataflow", "transformerless", (*APART, "dataflow=true", "execution.pin_cores=false")
    ),
    History("transformerless-time-only", "transformerless", (*APART, "mtp=1"), is_timing_only=True),
)


def requests() -> tuple[list[list[int]], list[SamplingParams], list[int]]:
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
    return prompts, params, arrivals


ABORTS = {3: 400_000, 6: 1_000_000}  # number of the request -> ns from when it is first scheduled


def tell(history: History) -> list[Line]:
    """Run a history, and tell it in lines sorted by time."""
    with tempfile.TemporaryDirectory() as directory:
        pool = (f"ems.path={directory}", "ems.block_size=16", "ems.servers=2") if history.has_pool else ()
        overrides = (*SMALL, *pool, *history.overrides)
        if history.has_pool:
            _serve(history, overrides)
        return _serve(history, overrides)


def _serve(history: History, overrides: Sequence[str]) -> list[Line]:
    prompts, params, arrivals = requests()
    with LLM(
        MODEL,
        history.deployment,
        "int8",
        overrides=overrides,
        trace=True,
        trace_dies=0,
        timing_only=history.is_timing_only,
        progress=False,
        faults=history.faults,
    ) as llm:
        engine, told = llm.engine, list[Line]()
        clock = engine.plan.pod.clock

        def note(event: Observed) -> None:
            name, numbers = type(event).__name__, f"{clock.now} -1 told {len(told)}"
            told.append(Line(f"{numbers} {_integers(event)}", f"{name} {_said(event)}"))

        engine.observe(note)
        abort_on_the_way(engine, ABORTS)
        meanwhile = partial(change_tes, history.life) if history.life else None
        try:
            outputs = llm.generate(prompts, params, arrivals_ns=arrivals, meanwhile=meanwhile)
        except XDeepServeError as error:
            outputs = error.outputs
        end_ns = clock.now
        lines = [*told, *_traced(engine.plan.pod.trace), *_came(outputs), Line(f"{end_ns} -1 end", "")]
        engine.check_integrity()
    return sorted(lines, key=lambda line: (int(line.numbers.partition(" ")[0]), line))


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
    names = [history.name for history in HISTORIES]
    ordered = {name: kept[name] for name in names if name in kept}
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
    by_name = {history.name: history for history in HISTORIES}
    if unknown := [name for name in args.names if name not in by_name]:
        parser.error(f"no history is called {unknown[0]}; there are {', '.join(by_name)}")
    kept, num_parted = kept_digests(), 0
    for name in args.names or by_name:
        lines = tell(by_name[name])
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
