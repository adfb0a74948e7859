"""The pictures of `docs/page.md`: a small pod that answers, a token's way, a record of a superpod, a phone.

    python tools/page_screens.py RECORD [DIR]

RECORD is one of a superpod in time only (`generate --deployment superpod --timing-only --record RECORD`).
Needs Chromium, and `PYTHONPATH=.`: the tests drive the same browser.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp.test_utils import TestServer
from tests.page.chromium import Tab, chromium

from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.llm import build_engine

SCREENS = Path(__file__).parent.parent / "docs" / "screens"
FOX = "document.querySelector('#ideas button').click()"
ANSWERED = "document.querySelectorAll('.digest code').length >= {}"


async def settle(tab: Tab) -> None:
    """Until colours and places have stopped moving."""
    await tab.run("new Promise((done) => setTimeout(done, 2500))")


async def answered(tab: Tab, times: int) -> None:
    """The first idea, asked and asked again, and a step of its decode drawn."""
    for number in range(1, times + 1):
        await tab.run(FOX)
        await tab.until(ANSWERED.format(number))
    await tab.until("xdeepserve.shown.step && xdeepserve.shown.traffic")
    await settle(tab)


async def small_pod(tab: Tab, address: str, folder: Path) -> None:
    """A desktop: the pod, and below it a token that is followed into the bytes of an expert die."""
    await tab.open(address, 1440, 1000)
    await tab.until("globalThis.xdeepserve && xdeepserve.shown")
    await answered(tab, 2)
    await tab.run("document.querySelector('.told').scrollIntoView({block: 'nearest'})")
    await tab.picture(folder / "small-pod.webp", "webp")
    names = await tab.run("[...document.querySelectorAll('.stop b')].map((b) => b.textContent)")
    posted, come = names.index("A2E 4"), names.index("A2E' 6-7")
    await tab.run(f"document.querySelectorAll('.stop')[{come}].click()")
    await tab.until("document.querySelector('#token-way .bytes table')")
    await tab.run(f"document.querySelectorAll('.stop')[{posted}].scrollIntoView({{block: 'start'}})")
    await tab.run("scrollBy(0, -60)")
    await settle(tab)
    await tab.picture(folder / "token.webp", "webp")


async def phone(tab: Tab, address: str, folder: Path) -> None:
    """360 px wide, and dark."""
    await tab.open(address, 360, 780, dark=True)
    await tab.until("globalThis.xdeepserve && xdeepserve.shown")
    await answered(tab, 1)
    await tab.run("document.getElementById('pod').scrollIntoView({block: 'start'})")
    await settle(tab)
    await tab.picture(folder / "phone-dark.webp", "webp")


async def superpod(tab: Tab, address: str, record: Path, folder: Path) -> None:
    """A record, dark, at its last drawn step."""
    await tab.open(address, 1680, 1050, dark=True)
    await tab.until("globalThis.xdeepserve && xdeepserve.shown")
    await tab.choose_file("#open", record)
    await tab.until("xdeepserve.shown.pod.dies.length > 700")
    await tab.run("scrub.value = scrub.max; scrub.dispatchEvent(new Event('input'))")
    await settle(tab)
    await tab.picture(folder / "superpod-dark.webp", "webp")


async def main(record: Path, folder: Path) -> None:
    engine = build_engine("tiny", "transformerless", "int8", overrides=["recovery.failover=true"])
    server = TestServer(build_app(engine, ServerOptions(admin=True)))
    await server.start_server(shutdown_timeout=1.0)
    async with server:
        address = str(server.make_url("/"))
        async with chromium() as tab:
            await small_pod(tab, address, folder)
        async with chromium() as tab:
            await phone(tab, address, folder)
        async with chromium() as tab:
            await superpod(tab, address, record, folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else SCREENS))
