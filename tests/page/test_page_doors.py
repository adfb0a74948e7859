"""What the page may ask of a pod: a die's bytes, and that one breaks."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.page.conftest import Serve
from xdeepserve.page.breaking import MENU, NEEDS_ADMIN
from xdeepserve.page.parts import PARTS

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "page.md"
BODY = {
    "prompt": [5, 6, 7],
    "max_tokens": 32,
    "temperature": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
}


async def asked(session: aiohttp.ClientSession, address: str) -> list[int]:
    async with session.post(f"{address}v1/completions", json=BODY) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["token_ids"]


async def broken(session: aiohttp.ClientSession, address: str, **body: object) -> tuple[int, str]:
    async with session.post(f"{address}page/break", json=body) as answer:
        return answer.status, await answer.text()


def test_the_document_names_every_field() -> None:
    text = DOCUMENT.read_text()
    for name, part in PARTS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        fields = {"rows"} if name in ("requests", "events") else {*part.__struct_fields__}
        assert not {field for field in fields if f"`{field}`" not in row}, name
    for name, part in (("pod", "tes"), ("pod", "dies"), ("step", "spans")):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}.{part}` |")]
        kind = msgspec.inspect.type_info(PARTS[name])
        (field,) = [each for each in kind.fields if each.name == part]  # type: ignore[attr-defined]
        fields = {each.name for each in field.type.item_type.fields}
        assert not {each for each in fields if f"`{each}`" not in row}, part


async def test_bytes_of_a_die(serve: Serve) -> None:
    async with serve() as (address, engine), aiohttp.ClientSession() as session:
        await asked(session, address)

        async def told(**query: str) -> tuple[int, dict]:
            async with session.get(f"{address}page/bytes", params=query) as answer:
                return answer.status, await answer.json()

        status, of_die = await told(die="8")
        assert (status, of_die["place"]) == (200, "s00.c4.d0")
        named = {name: (area, nbytes) for area, name, _, nbytes in of_die["regions"]}
        assert named["doorbell"] == ("metadata", 32)
        fields = "a2e.mb0.domain0.tokens.fields"
        status, found = await told(die="8", region=fields)
        (region,) = [area.regions[fields] for area in engine.plan.pod.plan(8).areas if fields in area.regions]
        data = bytes(engine.plan.pod.memory(8).read(region.offset, 32))
        assert found["hex"] == data.hex()
        (event, pointer, count) = found["members"]
        assert [event[0], pointer[0], count[0]] == ["event_id", "pointer", "num_tokens"]
        assert [event[2], pointer[2], count[2]] == [0, 8, 16]
        assert int(event[3][0]) == int.from_bytes(data[:8], "little") > 0
        for query, said in (
            ({"die": "700"}, "die 700 has no memory"),
            ({"die": "x"}, "a die has a number"),
            ({"die": "\N{ARABIC-INDIC DIGIT FOUR}"}, "a die has a number"),
            ({"die": "8", "region": "attic"}, "no region"),
            ({}, "a die has a number"),
        ):
            status, found = await told(**query)
            assert status == 400
            assert said in found["error"]["message"]


async def test_breaking_is_for_servers_that_allow_it(serve: Serve) -> None:
    async with serve("monolithic") as (address, _), aiohttp.ClientSession() as session:
        status, said = await broken(session, address, die=0)
        assert (status, NEEDS_ADMIN in said) == (403, True)


async def test_keys_guard_what_the_page_is_told(serve: Serve) -> None:
    async with (
        serve("monolithic", admin=True, keys=("secret",)) as (address, _),
        aiohttp.ClientSession() as session,
    ):
        for path in ("page/frames", "page/bytes?die=0"):
            async with session.get(address + path) as answer:
                assert answer.status == 401
        assert (await broken(session, address, die=0))[0] == 401
        async with session.get(address) as answer:
            assert answer.status == 200  # the page itself asks for the key


async def test_a_loss_that_nobody_would_outlive_is_refused(serve: Serve) -> None:
    async with serve("monolithic", admin=True) as (address, _), aiohttp.ClientSession() as session:
        expected = await asked(session, address)
        status, said = await broken(session, address, die=0)
        assert status == 400
        assert "recovery.failover=true" in said
        for body, words in (
            ({"die": 9}, "the pod has no die 9: it has 0 to 0"),
            ({"die": -1}, "the pod has no die -1"),
            ({"die": 0, "kind": "sad"}, "kind"),
            ({"kind": "lost"}, "die"),
        ):
            status, said = await broken(session, address, **body)
            assert status == 400
            assert words in said
        assert await asked(session, address) == expected


async def test_a_die_that_breaks_changes_no_bit(serve: Serve) -> None:
    async with (
        serve("colocated", "dies=2", "recovery.failover=true", admin=True) as (address, engine),
        aiohttp.ClientSession() as session,
    ):
        expected = await asked(session, address)
        status, said = await broken(session, address, die=1, kind="slow")
        assert (status, f"kind must be one of {', '.join(MENU)}, found 'slow'" in said) == (400, True)
        for kind in sorted(MENU, key="lost".__eq__):
            assert (await broken(session, address, die=1, kind=kind))[0] == 200
            assert await asked(session, address) == expected
            if kind == "lost":
                assert engine.stats().num_recoveries["2"] == 1
        assert engine.plan.pod.lost >= {1}
        status, said = await broken(session, address, die=1)
        assert (status, "lost already" in said) == (400, True)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("deployment", "losses"),
    [
        (("monolithic", "recovery.failover=true"), {0: "0 dies that would be left are too few"}),
        (("colocated", "dies=2", "recovery.failover=true"), {0: "", 1: "too few"}),
        (
            ("transformerless", "recovery.failover=true"),
            {0: "", 4: "", 9: "", 8: "recovery.max_restarts allows no more", 5: ""},
        ),
        (
            ("transformerless", "recovery.failover=true", "recovery.max_restarts=1"),
            {0: "", 12: "recovery.max_restarts allows no more"},
        ),
        (("eaas", "recovery.failover=true", "experts.copies=1"), {7: "", 0: ""}),
    ],
    ids=["one die", "two", "three restarts", "one restart", "expert servers"],
)
async def test_what_is_not_refused_is_outlived(
    serve: Serve, deployment: tuple[str, ...], losses: dict[int, str]
) -> None:
    async with serve(*deployment, admin=True) as (address, _), aiohttp.ClientSession() as session:
        expected = await asked(session, address)
        for die, refusal in losses.items():
            status, said = await broken(session, address, die=die)
            assert (status, refusal in said) == (400 if refusal else 200, True), (die, said)
            assert await asked(session, address) == expected


async def test_one_loss_after_the_other(serve: Serve) -> None:
    """While the pod rests no time passes, and what was asked for has not happened."""
    async with (
        serve("colocated", "dies=4", "recovery.failover=true", admin=True) as (address, _),
        aiohttp.ClientSession() as session,
    ):
        assert (await broken(session, address, die=0))[0] == 200
        for die, refusal in ((0, "die 0 is lost already"), (1, "die 0 is about to be lost")):
            status, said = await broken(session, address, die=die)
            assert (status, refusal in said) == (400, True)
