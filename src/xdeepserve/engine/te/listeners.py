"""Actions of a TE's parts when one of its members moves, by their names in the table HEARS (`te.members`).

No die waits for a client of expert servers: servers serve all clients that ask, and DP groups have loops of
their own. So a TE can miss a client, as it can miss a server (EaaS 3.4, 5.4). Then all servers release the
client's slots, and its requests go on elsewhere, from their tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdeepserve.comm.services.layout import Presence
from xdeepserve.comm.services.server import ServiceServer
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die.expert_memory import STOP
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.dp.events import ClientLost, EventLog, ServerHeard, ServerMoved
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.recovery.rollback_field import Epochs, RollbackField
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.masters import Masters
from xdeepserve.engine.te.members import PRESENCE, Act, Listener, Stay
from xdeepserve.engine.te.server_monitor import ServerMonitor
from xdeepserve.engine.te.te_plan import TEPlan


def service(server: Stay) -> ServiceServer:
    """Return a server's end of the protocol."""
    assert isinstance(server.program, ExpertServerProgram)
    assert isinstance(server.program.server, ServiceServer)
    return server.program.server


def release(plan: TEPlan, monitor: ServerMonitor, ranks: Iterable[int]) -> None:
    """Release the slots of a TE's clients on all servers, and on those that come later."""
    clients, members = [plan.members.client_numbers[rank] for rank in ranks], plan.members
    members.set.released.update(clients)
    for server in members.servers:
        if monitor.memory_answers(server.die):  # else it is lost as well; a server in its place is told
            for client in clients:
                service(server).release(client)


def admit(plan: TEPlan, monitor: ServerMonitor) -> None:
    """Let a TE's clients have the slots that clients of another TE have had before."""
    members = plan.members
    clients = members.set.released.intersection(members.client_numbers)
    members.set.released -= clients
    for server in members.servers:
        if monitor.memory_answers(server.die):
            for client in sorted(clients):
                service(server).admit(client)


def listeners(
    plan: TEPlan,
    tell: EventLog,
    groups: Sequence[DPGroup],
    health: Heartbeats,
    recovery: Rollback,
    balance: Reconfiguration | None,
    monitor: ServerMonitor,
    masters: Masters,
    program: Act,
    process: Act,
) -> dict[Listener, Act]:
    """Return the actions of a TE's parts; `program` makes a server's program, `process` starts it."""
    name, pod, members = plan.name, plan.pod, plan.members

    def write_epoch(server: Stay) -> None:
        RollbackField(pod.dies[server.die]).write(Epochs(recovery.epoch, recovery.epoch))

    def free_slots(member: Stay) -> None:
        """Release the slots of a lost client on all servers, or those of all lost clients on a new server."""
        if member.kind == "client":
            release(plan, monitor, [member.seat])
            return
        for client in sorted(members.set.released):
            service(member).release(client)

    def stop(server: Stay) -> None:
        assert server.mem is not None
        server.mem.doorbell.write(pod.memory(server.die), STOP)

    def end_die(member: Stay) -> None:
        pod.lose([member.die])
        for process in pod.dies[member.die].running:
            process.cancel()

    def take_replicas(server: Stay) -> None:
        if balance is not None:
            balance.leave_out(server.seat)

    def move_replicas(heir: Stay) -> None:
        assert heir.mem is not None
        if balance is not None:
            balance.replace(heir.seat, heir.die, heir.mem)

    def move_requests(client: Stay) -> None:
        scheduler = groups[client.seat].scheduler
        scheduler.abandon()
        scheduler.move_out()

    def show_heard(server: Stay) -> None:
        tell(ServerHeard(name, server.seat, server.die, PRESENCE[server.at] is Presence.LOST))

    def show_moved(server: Stay) -> None:
        tell(ServerMoved(name, server.seat, server.die, server.epoch, is_there=server.is_seated))

    return {
        "mask": monitor.tell_presence,
        "address": monitor.tell_address,
        "epoch field": write_epoch,
        "slots": free_slots,
        "program": program,
        "process": process,
        "doorbell": stop,
        "pod": end_die,
        "heartbeats": lambda client: health.forget(GroupRank(client.seat)),
        "rollback": lambda member: recovery.leave_out(member.die),
        "replicas": take_replicas,
        "holder": move_replicas,
        "steps": lambda client: masters.end(GroupRank(client.seat)),
        "requests": move_requests,
        "show heard": show_heard,
        "show moved": show_moved,
        "show lost": lambda client: tell(ClientLost(name, GroupRank(client.seat), client.die)),
    }
