"""`xdeepserve chaos`: its schedules, what it finds when a bug is put back, and how it says so."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.chaos.tools import tried
from xdeepserve.chaos import aftermath, campaign, permitted
from xdeepserve.chaos.campaign import ChaosCounts, Trial, shrink
from xdeepserve.chaos.draw import FAILOVER, PODS, SMALL, draw
from xdeepserve.chaos.fault_schedule import FaultSchedule, asked, read_schedule, write_schedule
from xdeepserve.chaos.judge import Judge
from xdeepserve.chaos.single_faults import every_step
from xdeepserve.cli import main
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.engine.dp.handover import Handover
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.recovery.rollback_watch import RollbackWatch
from xdeepserve.engine.ways.among.real import Among
from xdeepserve.engine.ways.group import real as group_real
from xdeepserve.errors import InputError
from xdeepserve.history import TEChange
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.fault_kinds import KINDS
from xdeepserve.hw.faults import Fault
from xdeepserve.model.presets import resolve_model

TWO = ("max_model_len=64", "prefill.count=2", "prefill.dies=1", "decode.dies=1")
APART = ("attention.domains=2", "attention.dies=1", "experts.routed_dies=2", "experts.shared_dies=1")
FOUND = {  # bugs that chaos has found, as small as it made them
    "a lost die's host had it take part in an all-gather": FaultSchedule(
        "colocated",
        (*SMALL, "dies=2", "scheduler.statuses=all-gather"),
        seed=15,
        faults=(Fault(4.721, 1, "lost"),),
    ),
    "a die that was lost while it took part in an all-gather read its own bytes": FaultSchedule(
        "moe-attention",
        (*SMALL, *APART, "lockstep=true", "mtp=1", "scheduler.route=cost", "scheduler.statuses=all-gather"),
        seed=1187,
        clock_seed=1187,
        faults=(Fault(9.773, 1, "stalled", 2.099), Fault(15.555, 0, "lost")),
    ),
    "the results of a lost die were read": FaultSchedule(
        "colocated",
        (*SMALL, "dies=4", "execution.overlap=true", "scheduler.dispatch=two-level"),
        seed=2194,
        num_requests=6,
        clock_seed=2194,
        faults=(Fault(127.48, 1, "stalled", 840.937), Fault(18139.509, 3, "lost")),
    ),
    "lockstep ran a die that was lost while it waited for the others": FaultSchedule(
        "moe-attention",
        (*SMALL, *APART, "lockstep=true"),
        seed=2448,
        num_requests=2,
        faults=(Fault(1.658, 3, "lost"),),
    ),
    "a transfer whose end nobody had looked at released the blocks that went to another TE": FaultSchedule(
        "pd",
        (
            "max_model_len=64",
            "scheduler.max_num_seqs=3",
            "scheduler.max_num_batched_tokens=24",
            "checksums=true",
            "prefill.dies=2",
            "prefill.tp=2",
            "decode.dies=2",
            "decode.count=2",
            "transfer=layer",
            "transfer_over=send-receive",
            "execution.overlap=true",
            "scheduler.admission=decode",
        ),
        seed=1066,
        num_requests=5,
        clock_seed=1066,
        faults=(
            Fault(5.87, kind="blocked", for_us=28.773, link=(2, 1), plane="ub"),
            Fault(263.795, kind="stalled", die=3, for_us=453.302),
            Fault(6927.822, kind="lost", die=2),
            Fault(18851.45, kind="glitch", die=5, code="unspecified"),
        ),
    ),
    "a die lost within a poll of the end of its wait took what lay there for its peer's field": FaultSchedule(
        "moe-attention",
        (
            "scheduler.max_num_batched_tokens=24",
            "attention.dies=1",
            "dataflow=true",
            "scheduler.statuses=all-gather",
            "ems.block_size=16",
        ),
        seed=25051,
        num_requests=6,
        pool="filled",
        faults=(Fault(164.062, 1, "lost"),),
    ),
}
RECOVERED = {  # bugs that steps run again have found; nobody may fail of these
    "steps of a client that is lost were looked at when a page was lost later": FaultSchedule(
        "eaas",
        ("scheduler.max_num_seqs=3", "attention.dies=2", "experts.copies=1", "execution.overlap=true"),
        seed=4003245,
        num_requests=4,
        faults=(Fault(3000.3, 1, "lost"), Fault(30000.9, 5, "bad-page", page=29)),
    ),
    "an expert die whose kernels had all failed was over for its program": FaultSchedule(
        "moe-attention",
        (*SMALL, *APART, "lockstep=true"),
        seed=230,
        num_requests=2,
        faults=(Fault(246.478, 2, "glitch", code="mte-error"),),
    ),
    "blocks that a step planned ahead copies were not copied again": FaultSchedule(
        "monolithic",
        (*SMALL, "execution.overlap=true", "cache.num_blocks=8", "cache.num_host_blocks=8"),
        seed=69,
        num_requests=5,
        faults=(Fault(8760.9, 0, "glitch", code="vector-core-exception"),),
    ),
    "an error code took the place of the call back, just before that was heard": FaultSchedule(
        "moe-attention",
        ("attention.dies=1",),
        seed=600221,
        num_requests=1,
        faults=(
            Fault(4.16, 0, "glitch", code="dma-error"),
            Fault(4.61, 2, "glitch", code="vector-core-exception"),
        ),
    ),
    "an error code just before it heard that all go on ended an expert die's program": FaultSchedule(
        "moe-attention",
        (),
        seed=29121,
        num_requests=1,
        faults=(
            Fault(5.952, 0, "bad-page", page="weights/layers.0.wo"),
            Fault(99.526, 4, "bad-page", page=34),
        ),
    ),
}
OTHERS_GO_ON = {  # a TE is lost, and nobody may miss it
    "what lay in a lost die's fields was taken for the number of a message": FaultSchedule(
        "transformerless",
        ("attention.dies=1", "prefill.dies=2", "transfer=layer", "transfer_over=send-receive", *FAILOVER),
        seed=202498,
        num_requests=3,
        faults=(Fault(14971.191, 2, "lost"),),
    ),
    "blocks had come, and nobody had looked, when the TE that they came from was lost": FaultSchedule(
        "pd",
        (
            *SMALL,
            "prefill.dies=2",
            "prefill.tp=2",
            "decode.dies=2",
            "prefill.count=2",
            "cache.num_blocks=8",
            "cache.num_host_blocks=8",
            "cache.preemption=swap",
            "scheduler.admission=decode",
            "scheduler.statuses=all-gather",
        ),
        seed=300004,
        num_requests=6,
        faults=(Fault(13716.1, 1, "lost"),),
    ),
    **{
        f"{what} while a TE that was to take the place of another served its dummy request": FaultSchedule(
            "eaas",
            ("recovery.failover=true",),
            seed=44,
            num_requests=1,
            faults=(Fault(4.244, 4, "lost"), fault),
        )
        for what, fault in (
            ("a client that nobody else waits for was lost", Fault(2064.194, 0, "lost")),
            ("the only server with some experts was lost", Fault(2030.0, 6, "lost")),
            ("a client reported an error once", Fault(2064.194, 0, "glitch", code="unspecified")),
            ("a link failed", Fault(2030.0, link=(0, 6), plane="ub", kind="down")),
        )
    },
}
CROWDED = (
    FaultSchedule(  # without a fault: choices without blocks waited for those whose blocks waited for them
        "pd",
        (
            "max_model_len=64",
            "decode.dies=2",
            "transfer_over=send-receive",
            "execution.decode.overlap=true",
            "cache.num_blocks=6",
            "scheduler.admission=decode",
            "ems.block_size=16",
        ),
        seed=5109,
        num_requests=7,
        pool="empty",
    )
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(resolve_model("tiny-random")) as judge:
        yield judge


def test_a_seed_is_a_schedule(judge: Judge) -> None:
    config = judge.checkpoint.config
    schedules = [draw(seed, list(PODS), config) for seed in range(120)]
    assert schedules == [draw(seed, list(PODS), config) for seed in range(120)]
    assert {schedule.deployment for schedule in schedules} == {*PODS}
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == {*KINDS}
    assert {schedule.pool for schedule in schedules} == {"none", "empty", "filled", "crowded"}
    for schedule in schedules:  # with fewer requests, the first ones stay as they are
        assert asked(msgspec.structs.replace(schedule, num_requests=1)) == asked(schedule)[:1]


def test_schedules_are_files(tmp_path: Path, judge: Judge) -> None:
    schedule = draw(7, ["pd"], judge.checkpoint.config)
    write_schedule(schedule, tmp_path / "one.json")
    assert read_schedule(tmp_path / "one.json") == schedule
    (tmp_path / "one.json").write_text('{"deployment": 3}')
    for bad in ("one.json", "none.json"):
        with pytest.raises(InputError, match=rf"^schedule .*{bad}[:,] "):
            read_schedule(tmp_path / bad)


def test_what_is_permitted_follows_from_the_plan(judge: Judge) -> None:
    one_prefill = FaultSchedule("pd", TWO, faults=(Fault(100.0, 0, "lost"),))
    both = msgspec.structs.replace(one_prefill, faults=(*one_prefill.faults, Fault(100.0, 1, "lost")))
    decode = msgspec.structs.replace(one_prefill, faults=(Fault(100.0, 2, "lost"),))
    stalled = FaultSchedule("colocated", ("dies=2",), faults=(Fault(100.0, 0, "stalled", 9.0),))
    verdicts = [judge.judge(each, twice=True) for each in (one_prefill, both, decode, stalled)]
    assert [finding.verdict for finding in verdicts] == ["equal", "named error", "named error", "equal"]
    assert verdicts[0].lost == ("prefill 0",)
    assert "die 0 of prefill 0 is lost" in verdicts[1].why or "waits for peer" in verdicts[1].why


@pytest.mark.always
@pytest.mark.parametrize(
    ("count", "equal", "named"), [(12, 2, 0), pytest.param(50, 8, 4, marks=pytest.mark.campaign)]
)
def test_random_schedules_come_to_nothing_bad(judge: Judge, count: int, equal: int, named: int) -> None:
    found = tried(judge, campaign.random_trials(judge, list(PODS), count, seed=0))
    assert found.bugs == []
    assert found.tally.schedules == count
    assert found.tally.equal > equal
    assert found.tally.named_errors > named
    assert found.tally.stages["2"] > 0


@pytest.mark.parametrize("bug", FOUND)
def test_what_was_found_stays_mended(judge: Judge, bug: str) -> None:
    finding = judge.judge(FOUND[bug], twice=True)
    assert finding.verdict == "named error", finding


def test_a_client_that_is_lost_during_a_copy_is_missed_by_nobody(judge: Judge) -> None:
    """Each heartbeat put off the copy's deadline once, and then the copy's deadline cost the TE."""
    schedule = FaultSchedule(
        "eaas",
        ("ems.block_size=16",),
        seed=1045,
        num_requests=1,
        pool="filled",
        faults=(Fault(3.581, 0, "lost"),),
    )
    finding = judge.judge(schedule, twice=True)
    assert finding.verdict == "equal", finding


@pytest.mark.parametrize("bug", OTHERS_GO_ON)
def test_a_te_that_is_lost_is_missed_by_nobody(judge: Judge, bug: str) -> None:
    finding = judge.judge(OTHERS_GO_ON[bug], twice=True)
    assert (finding.verdict, len(finding.lost)) == ("equal", 1), finding


def test_a_pod_without_faults_serves_all(judge: Judge) -> None:
    assert judge.judge(CROWDED).verdict == "equal"


def test_what_takes_too_long_is_a_hang_and_lets_its_pool_go(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aftermath, "PATIENCE_S", 0)
    finding = judge.judge(CROWDED)
    assert finding.verdict == "hang"
    assert "request 0 has no end" in finding.why


def glitches(judge: Judge, num: int) -> Iterator[FaultSchedule]:
    """Random schedules in which every fault is a glitch. Failover would make good what these do."""
    for seed in range(num):
        schedule = draw(seed, list(PODS), judge.checkpoint.config)
        dies = [each for each in schedule.faults if each.die is not None]
        faults = tuple(Fault(each.at_us, each.die, "glitch", code="dma-error") for each in dies)
        settings = tuple(setting for setting in schedule.settings if setting not in FAILOVER)
        yield msgspec.structs.replace(schedule, settings=settings, faults=faults)


@pytest.mark.parametrize("bug", RECOVERED)
def test_steps_that_are_run_again_have_the_same_bits(judge: Judge, bug: str) -> None:
    finding = judge.judge(RECOVERED[bug], twice=True)
    assert (finding.verdict, set(finding.stages)) == ("equal", {"3"}), finding


@pytest.mark.campaign
def test_glitches_alone_permit_no_error(judge: Judge) -> None:
    """Of any deployment: all bits come, from the TEs that there are."""
    trials = [Trial(schedule, is_twice=schedule.seed % 8 == 0) for schedule in glitches(judge, 30)]
    found = tried(judge, trials)
    assert found.bugs == []
    assert found.tally.equal == len(trials)
    assert found.tally.stages["2"] == 0
    assert found.tally.stages["3"] > 8


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("owner", "name", "put_back"),
    [
        (Among, "reset", lambda self, rank, epoch: None),
        (Rollback, "later", staticmethod(lambda step_idx: step_idx + 1)),
        (Side, "reset", lambda self: None),
        (RollbackWatch, "is_called", property(lambda self: self.has_failed)),
    ],
    ids=["an exchange is not reset", "results in the wrong set", "a side is not reset", "an epoch ignored"],
)
def test_a_rollback_with_a_bug_is_found(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, put_back: object
) -> None:
    monkeypatch.setattr(owner, name, put_back)
    assert any(judge.judge(schedule).is_bug for schedule in glitches(judge, 120))


def keep_claim(self: Handover, seq: Sequence) -> None:
    """`Handover.drop`, but the blocks that were to receive a sequence stay taken."""
    place = self.places.of(seq)
    if place in ("reserved", "receiving"):
        self.rtc.finish(self.places.ticket_of(seq.seq_id))
        self.reserved.pop(seq.seq_id, None)
    if place == "receiving":
        seq.leave_blocks()
    if place != "elsewhere":
        self.places.move(seq, "get lost")


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("owner", "name", "put_back"),
    [
        (XCCL, "reset", lambda self: None),
        (Side, "reset", lambda self: None),
        (group_real, "first_event", lambda epoch: 0),
        (Handover, "drop", keep_claim),
        (RTC, "lose", lambda self, slots, holdings: None),
    ],
    ids=[
        "dispatch is not reset",
        "A2E is not reset",
        "collectives ignore the epoch",
        "a claim kept",
        "KV kept",
    ],
)
def test_a_bug_in_any_protocol_is_found_within_500_schedules(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, put_back: object
) -> None:
    """With all kinds of faults, which hide each other."""
    monkeypatch.setattr(owner, name, put_back)
    trials = campaign.random_trials(judge, list(PODS), 500, seed=0)
    assert any(judge.judge(trial.schedule).is_bug for trial in trials)


@pytest.mark.campaign
@pytest.mark.parametrize("deployment", PODS)
def test_hosts_that_stand_still_cost_time_alone(judge: Judge, deployment: str) -> None:
    """At any time, for as long as the control plane bears it."""
    rng, schedules = random.Random(f"hosts of {deployment}"), []
    for seed in range(30):
        at_us, for_us = (round(10 ** rng.uniform(0, 4.7), 3) for _ in range(2))
        fault = Fault(at_us, host=0, kind="stalled", for_us=for_us)
        settings = (*SMALL, *rng.choice(PODS[deployment]))
        schedules.append(FaultSchedule(deployment, settings, seed, rng.randint(1, 6), seed, (fault,)))
    found = tried(judge, [Trial(schedule, is_twice=seed % 8 == 0) for seed, schedule in enumerate(schedules)])
    assert found.bugs == []
    assert found.tally.equal == len(schedules)


def test_single_faults_are_at_every_operation(judge: Judge) -> None:
    found = every_step("moe-attention", judge.checkpoint)
    operations = {operation for operation, _ in found}
    assert {"MLA", "A2E", "Experts", "Gate"} <= operations
    assert len(found) > 1000
    some = [Trial(schedule, operation) for operation, schedule in found[:: len(found) // 20]]
    assert tried(judge, some).tally.is_clean


@pytest.mark.campaign
def test_a_bug_that_is_put_back_is_found(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of lost dies that answers: what is read there are other bits, or events that nobody has sent."""
    monkeypatch.setattr(AddressSpace, "check_alive", lambda self, nodes: None)
    found = tried(judge, campaign.random_trials(judge, list(PODS), 24, seed=0))
    assert found.bugs
    least, finding = found.bugs[0]
    assert finding.is_bug
    assert len(least.faults) == 1  # shrunk
    assert judge.judge(least, twice=True).verdict == finding.verdict


def test_what_is_found_is_made_small() -> None:
    faults = tuple(Fault(float(at), at, "lost") for at in range(1, 5))
    whole = FaultSchedule("colocated", ("dies=8", "mtp=1"), 3, num_requests=6, clock_seed=3, faults=faults)

    def still_fails(smaller: FaultSchedule) -> bool:
        return faults[2] in smaller.faults and smaller.num_requests >= 2 and "dies=8" in smaller.settings

    least = shrink(whole, still_fails)
    assert least == FaultSchedule("colocated", ("dies=8",), 3, num_requests=2, faults=(faults[2],))


@pytest.mark.parametrize(
    ("why", "is_named"),
    [
        ("die 3 of decode 0 is lost: its memory does not answer", True),
        ("combine: deadline passed: rank 1 waits for peer 0", True),
        ("index out of range", False),
    ],
)
def test_errors_have_to_name_who_is_lost(why: str, is_named: bool) -> None:
    assert bool(permitted.NAMED.search(why)) == is_named


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["chaos", "--schedules", "3", "--seed", "40", "--deployment", "pd", "--save", str(tmp_path)]
    assert main([*args, "--json"]) == 0
    counts = msgspec.json.decode(capsys.readouterr().out, type=ChaosCounts)
    assert counts.schedules == 3
    assert counts.equal + counts.named_errors == 3
    assert main([*args, "--part", "2/2"]) == 0  # the second of three
    said = capsys.readouterr().out
    assert said.startswith("pd               schedules                     1\n1 schedule")
    assert list(tmp_path.iterdir()) == []
    plan = tmp_path / "one.json"
    write_schedule(FaultSchedule("colocated", ("dies=2",), faults=(Fault(5.0, 1, "lost"),)), plan)
    assert main(["chaos", "--replay", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["named_errors"] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schedules", "0"], "--schedules 0: at least 1"),
        (["--deployment", "pdd"], "no chaos for deployment 'pdd' (did you mean pd?): known are"),
        (["--save", "/dev/null/place"], "--save /dev/null/place: cannot be made: Not a directory"),
        (["--replay", "/no/such/file"], "schedule /no/such/file: "),
        (["--schedules", "3", "--every-step"], "does not go with"),
        (["--part", "3/2"], "--part: '3/2' is not K/N with K from 1 to N"),
        (["--schedules", "2", "--part", "3/3"], "--part 3/3: there is nothing in it, of 2 in all"),
        (["--part", "two"], "--part: 'two' is not K/N"),
    ],
)
def test_bad_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["chaos", *args])
    except SystemExit as stop:
        code = int(str(stop.code))
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1000, 1500, 50))
def test_many_schedules(judge: Judge, seed: int) -> None:
    assert tried(judge, campaign.random_trials(judge, list(PODS), 50, seed)).bugs == []


def test_expert_servers_come_and_leave() -> None:
    """While faults happen: one answers for another that is lost, since it has come before; or has left."""
    config = resolve_model("tiny-random").config
    drawn = [draw(seed, ["eaas"], config) for seed in range(40)]
    whats = {change.what for schedule in drawn for change in schedule.servers}
    assert whats == {"add server", "remove server"}
    assert any("experts.vacancies=1" in schedule.settings for schedule in drawn)
    pod = PODS["eaas"][1]
    change = TEChange(1500.0, "add server", server=1)
    again = FaultSchedule(
        "eaas",
        (*SMALL, *pod, "services.heartbeat_ms=0.1"),
        num_requests=4,
        faults=(Fault(300.0, 3, "lost"), Fault(6000.0, 2, "lost")),
        servers=(change,),
    )
    assert "expert server 1 comes at 1500 us" in str(again)
    smaller = shrink(again, lambda schedule: schedule.servers == (change,))
    assert smaller.servers == (change,)
    assert smaller.faults == ()
    assert shrink(again, lambda schedule: len(schedule.faults) == 2).servers == ()
    with Judge(resolve_model("tiny-random")) as judge:
        assert judge.judge(again, twice=True).verdict == "equal"
        leaves = msgspec.structs.replace(
            again, servers=(TEChange(10.0, "remove server", server=2),), faults=again.faults[:1]
        )
        assert judge.judge(leaves).verdict in ("equal", "named error")
