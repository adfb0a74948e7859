"""Walkthrough 8: prefill-decode disaggregation.

Prefill computes much and keeps little; decode computes little and keeps much. So each gets dies of its own.
A prefilled request's KV blocks cross the pod as bytes, from the HBM of one die to that of another, by
DistFlow: eight steps (xDeepServe 5.1), in which nothing moves until decode has room.

This script prints the steps of three requests as they happen, and from a trace all eight of one, as the
paper's Figure 17 has them (`--trace FILE` draws them, with arrows from one to the next). Then it lets decode
run out of blocks, shows how the rest waits, and checks the bits. Then a long prompt's KV goes by request, and
by layer: while prefill computes the later ones. Kernels of both sides then send and receive KV, in place of a
DMA engine that pulls it, and the last fields of a message are printed. Prefill moves to Ascend 910B servers,
which are on another fabric. At last one of two links breaks, and its requests go by the other. All times are
virtual.

    python examples/08_pd.py
"""

from __future__ import annotations

import msgspec

from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.p2p.layout import RingField
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.events import Event, Registered, Released, StepEnded, TransferBegan
from xdeepserve.engine.dp.group import TransferEnded
from xdeepserve.hw.die import Die
from xdeepserve.llm import digest

POD = ["prefill.dies=2", "decode.dies=2"]
TIGHT = ["prefill.dies=1", "decode.dies=1", "max_model_len=64", "cache.num_blocks=4"]
PAIR = ["prefill.dies=1", "decode.dies=1", "max_model_len=1024", "scheduler.max_num_batched_tokens=1024"]
PROMPTS = [list(range(40)), [7, 7, 7], list(range(100, 120))]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def now(llm: LLM) -> str:
    return f"{llm.virtual_ns / 1000:9.1f} us"


def watch(llm: LLM) -> None:
    """Print what each side tells. Requests are called by the order in which they came."""

    def see(event: Event | StepEnded) -> None:
        match event:
            case Registered(group=group, slots=slots):
                what = f"step 3  prefill DP{group.rank}: request {event.seq_id} lies in its blocks {[*slots]}"
            case TransferBegan(group=group, is_source=False, nbytes=nbytes, peer=peer):
                room = f"room for request {event.seq_id}, {nbytes} bytes from {peer}"
                what = f"step 6  decode DP{group.rank}: {room}"
            case Released(group=group):
                what = f"step 8  prefill DP{group.rank}: frees the blocks of request {event.seq_id}"
            case TransferEnded(group=group, completion=completion) if not completion.is_source:
                what = f"step 8  decode DP{group.rank}: goes on with request {event.seq_id}"
            case _:
                return
        print(f"{now(llm)}  {what}")

    llm.engine.observe(see)


def eight_steps(llm: LLM, seq_id: int) -> None:
    """Who took which step of a request, from when to when."""
    trace = llm.engine.plan.pod.trace
    spans = [trace.spans[index] for index in trace.chains[f"request {seq_id}"]]
    for span in sorted(spans, key=lambda span: span.start_ns):
        when = f"{span.start_ns / 1000:7.1f} ..{span.end_ns / 1000:7.1f} us"
        print(f"{when} {trace.node_names[span.node]:<23} {span.name}")


def hand_over(transfer: str) -> None:
    """Serve one long prompt; print when prefill ends, and when decode has the KV."""
    with LLM("tiny-random", "pd", overrides=[*PAIR, f"transfer={transfer}"]) as llm:
        at_ns: list[int] = []

        def see(event: Event | StepEnded) -> None:
            if isinstance(event, TransferEnded) and not event.completion.is_source:
                at_ns.append(llm.virtual_ns)

        llm.engine.observe(see)
        metrics = llm.generate([[7] * 900], PARAMS)[0].metrics
        prefilled = metrics.first_token_ns
        gap = (at_ns[0] - prefilled) / 1000
        print(
            f"by {transfer:8} prefill ends at {prefilled / 1000:.1f} us, decode has the KV {gap:.1f} us later"
        )


def fields(die: Die, part: str) -> list[RingField]:
    """The tails or acks of all channels of a die."""
    region = die.memory.metadata.regions[f"kv.{part}"]
    return RingField.unpack_all(die.memory.read(region.offset, region.nbytes))


def send_and_receive() -> str:
    """The same requests through XCCL's rings; what the last message has left in the fields of both dies."""
    with LLM("tiny-random", "pd", overrides=[*POD, "transfer_over=send-receive"], trace=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        pod = llm.engine.plan.pod
        spans = [s for s in pod.trace.spans if s.lane == "MTE3" and s.name.startswith(("send", "receive"))]
        for span in spans[-2:]:
            print(f"{span.start_ns / 1000:9.1f} us  {pod.trace.node_names[span.node]}: {span.name}")
        for te, part in zip(llm.engine.je.tes, ("acks", "tails"), strict=True):
            newest = max(field for group in te.groups for die in group.dies for field in fields(die, part))
            said = f"event {newest.event_id}, chunk {newest.chunk_id}, pointer {newest.pointer}"
            print(f"newest of the {part} of {te.sizes.place.name}: {said}, {newest.nbytes} bytes")
        llm.engine.check_integrity()
        return digest(outputs)


def prefill_on(hardware: str) -> str:
    """The same requests with prefill on other hardware; a digest of what came out."""
    deployment = resolve("pd", [*POD, f"prefill.hardware={hardware}"])
    # A host that costs nothing: this model's kernels are so short that eager launches would hide them.
    deployment = msgspec.structs.replace(deployment, execution=None)
    with LLM("tiny-random", deployment) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        (link,) = llm.engine.je.links
        place = llm.engine.je.tes[0].groups[0].dies[0]
        first = outputs[0].metrics.first_token_ns / 1000
        print(
            f"{hardware:6} prefill on {place.name}, {place.spec.num_cores('aic')} AIC cores, KV over "
            f"{link.flow.backend.name}: first token after {first:.1f} us"
        )
        return digest(outputs)


def break_a_link() -> str:
    """Two decode TEs; nothing goes over the link to the first one."""
    with LLM("tiny-random", "pd", overrides=[*POD, "decode.count=2"]) as llm:
        broken, other = llm.engine.je.links

        async def no_carrier(copies, name) -> None:  # type: ignore[no-untyped-def]
            print(f"{now(llm)}  {name}: no carrier")
            raise OSError("no carrier")

        broken.flow.backend.move = no_carrier
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        for link in (broken, other):
            te = link.tes[1]
            state = "well" if not link.error else "avoided"
            print(f"{te.sizes.place.name}: {te.step_idx} steps, its link is {state}")
        llm.engine.check_integrity()
        return digest(outputs)


def main() -> None:
    with LLM("tiny-random", "monolithic") as one:
        expected = digest(one.generate(PROMPTS, PARAMS, keep_logits=True))
    print(f"--- {len(PROMPTS)} requests on 2 prefill dies (one DP group, TP2) and 2 decode dies")
    with LLM("tiny-random", "pd", overrides=POD, trace=True) as llm:
        watch(llm)
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        prefill, decode = llm.engine.je.tes
        print(f"{prefill.step_idx} prefill steps, {decode.step_idx} decode steps")
        print("\n--- Figure 17: the eight steps of request 0")
        eight_steps(llm, 0)
    print(f"the same tokens and logits as on one die: {digest(outputs) == expected}")

    print("\n--- Decode has 4 blocks, and a request needs 3: one at a time, the others keep their blocks")
    with LLM("tiny-random", "pd", overrides=TIGHT) as llm:
        watch(llm)
        llm.generate([[i] * 33 for i in range(3)], PARAMS)
        llm.engine.check_integrity()
        print(f"blocks in use at the end: {llm.engine.stats().kv_cache_usage:g}")

    print("\n--- A prompt of 900 tokens, both ways")
    hand_over("request")
    hand_over("layer")

    print("\n--- KV by send and receive: two kernels and a ring in place of DMA")
    print(f"the same tokens and logits as on one die: {send_and_receive() == expected}")

    print("\n--- Prefill on CloudMatrix dies, and on 910B: DistFlow takes the fabric that both sides are on")
    digests = {prefill_on("cm384"), prefill_on("910b")}
    print(f"the same tokens and logits as on one die: {digests == {expected}}")

    print("\n--- Two decode TEs, and a broken link: its requests go to the other, from the same blocks")
    print(f"the same tokens and logits as on one die: {break_a_link() == expected}")


if __name__ == "__main__":
    main()
