"""What a reader does with the page, in a headless Chromium."""

from __future__ import annotations

import pytest

from tests.page.chromium import chromium, find_chromium
from tests.page.conftest import Serve

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium on this machine")
SHOWN = "globalThis.xdeepserve && xdeepserve.shown"


async def test_a_prompt_is_answered_while_the_pod_is_drawn(serve: Serve) -> None:
    async with serve() as (address, engine), chromium() as tab:
        await tab.open(address)
        await tab.until(SHOWN)
        await tab.click("#prompt")
        await tab.type("Once upon a time")
        await tab.press("Enter")
        await tab.until("document.querySelector('.digest code')")
        assert await tab.run("document.querySelector('.told').textContent.length") > 4
        await tab.until("xdeepserve.shown.step")
        dies = await tab.run("xdeepserve.shown.pod.dies.map((row) => row[0])")
        assert dies == [die for te in engine.je.tes for die in te.plan.every_die]
        assert await tab.run("Math.max(...xdeepserve.shown.load.busy)") > 0
        assert await tab.run("document.querySelectorAll('#requests tr').length") == 2
        # What was drawn is there: the canvases are not blank.
        for canvas in ("map", "step", "heat", "pairs", "group-bars"):
            await tab.until(
                f"(() => {{ const c = document.getElementById('{canvas}'); const d = c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data; return d.some((x) => x); })()"
            )
        assert tab.problems == []
