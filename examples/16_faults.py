"""Walkthrough 16: a die fails in the middle of a combine, or dies, and every token stays.

Two decode TEs of two dies each serve six prompts. First nothing breaks, and a trace says when a die of the
second TE waits in a combine. Then the same is run again, which is the same to the nanosecond, but at that
moment the die's kernel ends with an error code: both dies of its TE go back to the iteration before, and run
it again. And once more, but at that moment the die is lost. Nobody is told. Its peer finds out when it reads
where nothing answers; the TE is given up, and the other goes on with its sequences from the tokens that there
are. At last with failover: the die that is left is tested, and the TE comes back on it. Times are virtual.

    python examples/16_faults.py
"""

from __future__ import annotations

from xdeepserve import LLM, RequestOutput, SamplingParams
from xdeepserve.comm.wire import FIELD
from xdeepserve.engine.dp import events
from xdeepserve.engine.recovery.rollback_field import RollbackField
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.memory import SCRIBBLE
from xdeepserve.llm import digest

POD = ["prefill.dies=1", "decode.count=2", "decode.dies=2", "max_model_len=128"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(6)]
DIE = 4  # of the second decode TE
LIVES = {"lost": "is given up", "loading": "loads its weights", "ready": "takes requests"}


def title(text: str) -> None:
    print(f"\n--- {text}")


def moment_in_a_combine() -> tuple[int, str]:
    """When the die is in the middle of a combine in a run without faults, and the digest of that run."""
    with LLM("tiny", "pd", overrides=POD, trace=True, trace_dies=0) as llm:
        expected = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
        waits = [
            span
            for span in llm.engine.plan.pod.trace.spans
            if span.node == DIE and span.name == "combine 5" and span.args and span.args["layer"] == 2
        ]
    span = waits[3]
    print(f"without faults die {DIE} polls its fields in step 5 of a combine of layer 2")
    print(f"from {span.start_ns} to {span.end_ns} ns")
    print(f"digest {expected}")
    return (span.start_ns + span.end_ns) // 2, expected


def show_fields(engine: Engine, note: str) -> None:
    """The fields of the die that its peers post to, as its memory has them."""
    memory = engine.plan.pod.memory(DIE)
    region = memory.metadata.regions["xccl.combine.fields"]
    print(f"  {engine.plan.pod.clock.now:>9} ns  {note}")
    for peer, at in enumerate(range(region.offset, region.offset + region.nbytes, FIELD.size)):
        raw = bytes(memory.buffer[at : at + FIELD.size])
        event, pointer, count = FIELD.unpack(raw)[:3]
        print(f"    from rank {peer}: {raw[:20].hex(' ', 4)}")
        is_gone = set(raw) == {SCRIBBLE}
        says = "nothing is there" if is_gone else f"event {event}, rows at {pointer}, {count} of them"
        print(f"      {says}")


def show_rollback_fields(engine: Engine, note: str) -> None:
    """What the host has written to the dies of the second decode TE."""
    print(f"  {engine.plan.pod.clock.now:>9} ns  {note}")
    for die in (DIE - 1, DIE):
        print(f"    rollback field of die {die}: {RollbackField(engine.plan.pod.dies[die]).read()}")


def tell(engine: Engine) -> None:
    """Print who rolls back, who is given up, and who goes on with what."""

    def observer(event: object) -> None:
        now = engine.plan.pod.clock.now
        if isinstance(event, events.TEChanged) and event.life in LIVES:
            print(f"  {now:>9} ns  {event.te} {LIVES[event.life]}")
        elif isinstance(event, events.Mended):
            print(f"  {now:>9} ns  both dies have come to epoch {event.epoch}; the step is launched again")
            print(f"    {event.te} had heard of an error at {event.begun_ns} ns:")
            print(f"    {event.reason}")
        elif isinstance(event, events.MovedOut):
            print(f"  {now:>9} ns    sequence {event.seq_id} leaves it")
        elif isinstance(event, events.Given) and event.seq_id in moved:
            print(f"  {now:>9} ns    sequence {event.seq_id} goes on at {event.group.te}")
        if isinstance(event, events.MovedOut):
            moved.add(event.seq_id)

    moved: set[int] = set()
    engine.observe(observer)


def main() -> None:
    """Everything in turn."""
    at_ns, expected = moment_in_a_combine()
    glitch(at_ns, expected)
    loss(at_ns, expected)
    failover(at_ns, expected)


def glitch(at_ns: int, expected: str) -> None:
    """The die's kernel ends with an error code; its memory stays."""
    title(f"The same again, but what die {DIE} is at ends with an error code at {at_ns} ns")

    async def watch(engine: Engine) -> None:
        tell(engine)
        await engine.plan.pod.clock.sleep_until(at_ns + 1)
        show_fields(engine, f"a nanosecond after, die {DIE} has what had come")
        show_rollback_fields(engine, "and the host has called both dies of its TE")
        await engine.plan.pod.clock.sleep_until(at_ns + 10_000)
        show_rollback_fields(engine, "all have come, and go on with the step")

    fault = Fault(at_ns / 1000, DIE, "glitch", code="vector-core-exception")
    with LLM("tiny", "pd", overrides=POD, faults=[fault]) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=watch)
        compare(outputs, expected)


def compare(outputs: list[RequestOutput], expected: str) -> None:
    """Print a prompt's tokens, and whether all have the bits of the run without faults."""
    title("The same tokens")
    found = digest(outputs)
    print(f"  of the second prompt: {outputs[1].outputs[0].token_ids}")
    print(f"  {found}")
    print(f"  {'equal' if found == expected else 'DIFFERENT'}")


def loss(at_ns: int, expected: str) -> None:
    """The die is lost with its memory."""
    title(f"The same again, but die {DIE} is lost at {at_ns} ns")

    async def watch(engine: Engine) -> None:
        tell(engine)
        await engine.plan.pod.clock.sleep_until(at_ns - 1)
        show_fields(engine, f"a nanosecond before, die {DIE} has")
        await engine.plan.pod.clock.sleep_until(at_ns + 1)
        show_fields(engine, "a nanosecond after, for whoever could look")

    with LLM("tiny", "pd", overrides=POD, faults=[Fault(at_ns / 1000, DIE, "lost")]) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=watch)
        why = str(llm.engine.lost["decode 1"])

    title("What its TE was given up for")
    print(f"  {why}")
    compare(outputs, expected)


def failover(at_ns: int, expected: str) -> None:
    """The die is lost, and its TE replaced."""
    title(f"And with recovery.failover=true when die {DIE} is lost")

    async def watch(engine: Engine) -> None:
        print_tes(engine)
        tell(engine)

    settings, faults = [*POD, "recovery.failover=true"], [Fault(at_ns / 1000, DIE, "lost")]
    with LLM("tiny", "pd", overrides=settings, faults=faults) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=watch)
        print_tes(llm.engine)
        print("    one die, where decode 1 had two: no other is free (recovery.spare_dies would give some)")
    compare(outputs, expected)


def print_tes(engine: Engine) -> None:
    """Who there is, and where."""
    for te in engine.tes():
        print(f"    {te.name}: {te.life}, dies {', '.join(map(str, te.dies))}")


if __name__ == "__main__":
    main()
