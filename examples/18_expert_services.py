"""Walkthrough 18: an expert is a service. A slot, state by state; a server dies, a replica answers.

Three expert servers have two experts each, and copies of two that others have. A client writes a request to
its slot on a server, and polls the slot from afar; the server polls its own memory, and never sends anything.
Then a server dies while it computes: between state 1 and state 2. The client asks those who have copies. At
last a whole model is served so, and loses a server, and not a bit; another one joins. Two task executors
(TEs) share servers: one goes on when the other is lost, and 1 of 64 servers is hardly missed. Times are
virtual.

    python examples/18_expert_services.py
"""

from __future__ import annotations

import asyncio

import numpy as np

from xdeepserve import LLM, SamplingParams, history
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.services.client import Patience, ServiceClient
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import HEADER, HEADER_AT, SLOT_NBYTES, ServiceLayout, SlotHeader
from xdeepserve.comm.services.reach import OverURMA
from xdeepserve.comm.services.rules import SlotState
from xdeepserve.comm.services.server import ServiceServer
from xdeepserve.engine.dp.events import ServerHeard, StepEnded
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.pod import Pod
from xdeepserve.llm import digest

CLIENT, SERVERS = 0, (1, 2, 16)
# Physical experts 0 to 5 are the experts themselves; 6 to 11 are copies, on two other servers each time.
EXPERT_RANK = (0, 0, 1, 1, 2, 2, 1, 2, 2, 0, 0, 1)
EXPERT_OF = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5)
LAYOUT = ServiceLayout(
    (CLIENT,), Group(SERVERS, EXPERT_RANK), max_tokens=2, top_k=2, hidden=8, quantize=False
)
TOKENS = np.array([[1, 1, 0.5, -1, 2, -0.25, 0, 1], [2, 0, 0, 1, 0, 0, 3, 1]], np.float32)
TOPK_IDX = np.array([[0, 2], [1, 4]], np.int32)  # expert e multiplies by e + 1
TOPK_WEIGHTS = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
COMPUTE_NS = 20_000


def title(text: str) -> None:
    print(f"\n--- {text}")


class Watch:
    """Prints the client's slot on a server as its memory has it, when a step is complete."""

    def __init__(self, pod: Pod, server: int) -> None:
        self.pod, self.server = pod, server
        self.shown = (-1, b"")

    def __call__(self, op: str, step: int) -> None:
        memory = self.pod.memory(SERVERS[self.server])
        at = memory.metadata.regions["services.slots"].offset + LAYOUT.state_at(0)
        raw = bytes(memory.buffer[at : at + SLOT_NBYTES])
        state, header = SlotState(raw[0]), raw[HEADER_AT : HEADER_AT + HEADER.size]
        if (state, header) != self.shown:
            print(f"  {self.pod.clock.now:>7} ns  {op}, step {step}: state {raw[:1].hex()} = {state.name}")
        if header != self.shown[1] and any(header):
            print(f"    header {header[:24].hex(' ', 4)}")
            print(f"    = {SlotHeader(*HEADER.unpack(header))}")
        self.shown = (state, header)


async def serve(pod: Pod, server: ServiceServer, dies_in_batch: int = 0) -> None:
    """Poll, compute, answer; in the `dies_in_batch`-th batch its die fails while it computes."""
    number = 0
    while True:
        batch = await server.next_batch(LAYOUT.rows_per_slot)
        number += 1
        rows = np.concatenate([each.received.payload for each in batch])
        experts = np.concatenate([each.received.expert_idx for each in batch])
        factors = np.array([EXPERT_OF[expert] + 1 for expert in experts], np.float32)
        await pod.clock.sleep(COMPUTE_NS // 2)
        if number == dies_in_batch:
            pod.clock.spawn(lose(pod, server))
        await pod.clock.sleep(COMPUTE_NS // 2)
        await server.answer(batch, rows * factors[:, None])


async def lose(pod: Pod, server: ServiceServer) -> None:
    print(f"  {pod.clock.now:>7} ns  die {server.die.index} of {server.label} is lost, and nobody is told")
    pod.break_die(server.die.index)


async def ask(shown: int, lost: int | None) -> tuple[np.ndarray, int]:
    """One exchange of the client; the answer, and how many requests replicas were asked."""
    pod = Pod()
    LAYOUT.plan_client(pod.plan(CLIENT))
    for die in SERVERS:
        LAYOUT.plan_server(pod.plan(die))
    pod.materialise()
    watch = Watch(pod, shown)
    for index, die in enumerate(SERVERS):
        server = ServiceServer(pod.dies[die], index, LAYOUT, 1, on_step=watch)
        pod.dies[die].spawn(serve(pod, server, 1 if index == lost else 0))
    known = KnownServers(OverURMA(pod.dies[CLIENT], LAYOUT), 0, LAYOUT)
    client = ServiceClient(
        *(0, 0, known, 1, lambda layer, expert: SAME[EXPERT_OF[expert]]),
        patience=Patience(replica_ns=100_000),
        on_step=watch,
    )

    async def exchange() -> np.ndarray:
        await client.a2e(TOKENS, TOPK_IDX, TOPK_WEIGHTS, event_id=1)
        return await client.e2a(event_id=1)

    result = await pod.dies[CLIENT].spawn(exchange())
    for die in pod.dies.values():
        for process in die.running:
            process.cancel()
    if lost is not None:
        print(f"  {pod.clock.now:>7} ns  the client has all answers")
    return result, client.num_resent


SAME = {e: [physical for physical, expert in enumerate(EXPERT_OF) if expert == e] for e in range(6)}


async def protocol() -> None:
    title("One request: the client's slot on server 0, which has expert 0 and expert 1")
    result, _ = await ask(0, None)
    for token, row in enumerate(result):
        print(f"token {token}: {row[:4].tolist()} ...")

    title("The same, and server 0 dies between state 1 and 2: the slot on server 1, which has a copy")
    again, resent = await ask(1, 0)
    print(f"requests that were asked again: {resent}; equal bits: {again.tobytes() == result.tobytes()}")


def whole_model() -> None:
    title("A whole model: 4 clients, 4 servers of routed experts, 2 of the shared one; each expert twice")
    prompts = [[10 + i, 20 + 3 * i, 30] for i in range(4)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM("tiny", "monolithic", overrides=["max_model_len=64"]) as llm:
        expected = digest(llm.generate(prompts, params, keep_logits=True))
    print(f"one die:             {expected[:23]}")
    settings = ["max_model_len=64", "experts.copies=1", "services.heartbeat_ms=0.2"]
    for faults in ((), (Fault(700.0, 5, "lost"),)):
        with LLM("tiny", "eaas", overrides=settings, faults=faults) as llm:
            llm.engine.observe(tell)
            found = digest(llm.generate(prompts, params, keep_logits=True))
        print(f"{'a server is lost:   ' if faults else 'expert services:    '} {found[:23]}")
    with LLM("tiny", "eaas", overrides=[*settings, "experts.vacancies=1"]) as llm:
        joined = llm.add_server()
        found = digest(llm.generate(prompts, params, keep_logits=True))
    print(f"  server {joined.server} joins on die {joined.die}, with copies of experts {joined.experts}")
    print(f"a server has joined: {found[:23]}")


def two_tes() -> None:
    title("Two TEs of 4 clients each, and the same servers for both; one TE is lost, another one comes")
    prompts = [[10 + i, 20 + 3 * i, 30] for i in range(8)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    settings = ["max_model_len=64", "experts.copies=1", "health.suspect_s=0.005", "health.lost_s=0.01"]
    with LLM("tiny", "monolithic", overrides=["max_model_len=64"]) as llm:
        expected = digest(llm.generate(prompts, params, keep_logits=True))
    print(f"one die:             {expected[:23]}")
    lost = [Fault(700.0, die, "lost") for die in range(4)]  # all clients of the TE that keeps the servers
    with LLM("tiny", "eaas", overrides=[*settings, "attention.count=2"], faults=lost) as llm:
        found = digest(llm.generate(prompts, params, keep_logits=True))
        print(f"a TE is lost:        {found[:23]}")
        print(f"  {', '.join(llm.engine.lost)} is lost, and {llm.engine.servers()[0].te} keeps the servers")
        joined = llm.add_te()
        dies = next(te.dies for te in llm.engine.tes() if te.name == joined)
        print(f"  {joined} joins with dies {dies}, and no server of its own")
        found = digest(llm.generate(prompts, params, keep_logits=True))
    print(f"another one comes:   {found[:23]}")


NUM_SERVERS, VICTIM, WINDOWS = 64, 5, 8


def one_of_64() -> None:
    title(
        f"Tokens in windows of virtual time: 2 TEs of 2 clients each, {NUM_SERVERS} servers, and one is lost"
    )
    shape = "attention.count=2", "attention.dies=1", f"experts.routed_dies={NUM_SERVERS - 2}"
    settings = *shape, "experts.shared_dies=2", "experts.copies=1", "services.heartbeat_ms=0.2"
    prompts = [[10 + i, 20 + 3 * i, 30] for i in range(16)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def told(*faults: Fault) -> history.Told:
        overrides = ("max_model_len=64", *settings)
        asked = history.History("eaas", overrides, prompts, params, faults=faults, model="tiny")
        return history.serve(asked, hears=(StepEnded, ServerHeard))

    without = told()
    half_ns = sorted(without.token_times)[len(without.token_times) // 2]
    lost = told(Fault(half_ns / 1e3, 2 + VICTIM, "lost"))
    width = max(without.token_times) / WINDOWS
    for window in range(WINDOWS + 1):
        counts = [sum(t // width == window for t in each.token_times) for each in (without, lost)]
        note = "  <- a server is lost" if half_ns // width == window else ""
        print(
            f"  from {window * width / 1e6:5.1f} ms: {counts[0]:>3} tokens, and with it {counts[1]:>3}{note}"
        )
    heard_ns = next(at for at, event in lost.events if isinstance(event, ServerHeard))
    ends = [max(each.token_times) for each in (without, lost)]
    took = [end - half_ns for end in ends]
    print(f"equal bits: {lost.digest == without.digest}; found after {(heard_ns - half_ns) / 1e6:.2f} ms")
    change = f"{took[0] / took[1] - 1:+.1%}"
    print(
        f"tokens a second from the loss to the end: {change} (published: a drop of less than 2 %, EaaS 5.4)"
    )
    print("A step of so small a model is mostly the fixed cost of exchanges: a server's share hardly shows.")


def tell(event: object) -> None:
    """What the monitor has found out."""
    if isinstance(event, ServerHeard):
        print(f"  the monitor masks server {event.server} (die {event.die}) for all clients")


if __name__ == "__main__":
    asyncio.run(protocol())
    whole_model()
    two_tes()
    one_of_64()
