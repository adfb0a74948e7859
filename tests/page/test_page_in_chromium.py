"""What a reader does with the page, in a headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from tests.page.chromium import Tab, chromium, find_chromium
from tests.page.conftest import Serve
from xdeepserve.api.server.server import build_app
from xdeepserve.llm import build_engine

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium on this machine")
SHOWN = "globalThis.xdeepserve && xdeepserve.shown"


# Cards that only a step fills; and whether two of the page's elements lie over each other.
DRAWN = "['steps', 'token', 'experts', 'traffic'].map((id) => document.getElementById(id))"
COVERS = """(() => { const [a, b] = [die, events].map((each) => each.getBoundingClientRect());
return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom; })()"""


async def test_a_prompt_is_answered_while_the_pod_is_drawn(serve: Serve) -> None:
    async with serve() as (address, engine), chromium() as tab:
        await tab.open(address)
        await tab.until(SHOWN)
        assert await tab.run(f"{DRAWN}.every((each) => !each.offsetParent) && !!before.offsetParent")
        await tab.run("most.value = 16")
        await tab.click("#prompt")
        await tab.type("Tell me a story about a bear called Tom.")
        await tab.press("Enter")
        await tab.until("document.querySelector('.digest code')")
        assert await tab.run("document.querySelector('.told').textContent.length") > 4
        await tab.until("xdeepserve.shown.step")
        dies = await tab.run("xdeepserve.shown.pod.dies.map((row) => row[0])")
        assert dies == [die for te in engine.je.tes for die in te.plan.every_die]
        assert await tab.run(f"{DRAWN}.every((each) => each.offsetParent) && !before.offsetParent")
        assert await tab.run("Math.max(...xdeepserve.shown.load.busy)") > 0
        assert await tab.run("document.querySelectorAll('#requests tr').length") == 2
        # What was drawn is there: the canvases are not blank.
        for canvas in ("map", "step", "heat", "pairs", "group-bars"):
            await tab.until(
                f"(() => {{ const c = document.getElementById('{canvas}'); const d = c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data; return d.some((x) => x); })()"
            )
        await tab.run("most.value = 3; many.click()")
        await tab.until("document.querySelectorAll('.digest code').length === 2")
        told = await tab.run("[...document.querySelectorAll('.digest')].at(-1).textContent")
        assert "16 choices, 48 tokens" in told
        assert "all the same bits" in told
        assert tab.problems == []


DIGEST = "[...document.querySelectorAll('.digest code')].map((code) => code.title)"


@pytest.mark.always
async def test_a_die_is_killed_and_the_digest_is_the_same(serve: Serve, tmp_path: Path) -> None:
    async with (
        serve("colocated", "dies=4", "recovery.failover=true", admin=True) as (address, engine),
        chromium() as tab,
    ):
        await tab.open(address)
        await tab.until(SHOWN)
        await tab.run("most.value = 64")
        await tab.click("#ideas button")
        await tab.until(f"{DIGEST}.length === 1")
        # A token is followed: the bytes of a step of the protocol are shown.
        await tab.until("xdeepserve.shown.step")
        await tab.press("Escape")
        await tab.until("document.querySelectorAll('.stop').length > 8")
        names = await tab.run("[...document.querySelectorAll('.stop b')].map((b) => b.textContent)")
        order = ["MLAProlog", "Gate", "dispatch 1", "dispatch 6-7", "Experts", "combine 1", "combine 6-7"]
        assert [name for name in names if name in order] == order
        at = names.index("dispatch 6-7")
        await tab.run(f"document.querySelectorAll('.stop')[{at}].click()")
        await tab.until("document.querySelector('#token-way .bytes pre')")
        told = await tab.run("document.querySelector('#token-way .bytes').textContent")
        assert "xccl.dispatch.rows" in told
        assert "payload" in told
        # Pause, and go back to the first frame and on by one.
        await tab.click("#pause")
        shown = await tab.run("xdeepserve.shown.frame")
        await tab.run("document.activeElement.blur()")
        await tab.press("ArrowLeft")
        assert await tab.run("xdeepserve.shown.frame") < shown
        await tab.run("scrub.value = 0; scrub.dispatchEvent(new Event('input'))")
        first = await tab.run("xdeepserve.history.states[0].frame")
        assert await tab.run("xdeepserve.shown.frame") == first
        await tab.press("ArrowRight")
        assert await tab.run("xdeepserve.shown.frame") > first
        await tab.click("#pause")
        # A die is chosen by keys, and lost while the same prompt is answered.
        await tab.run("document.getElementById('map').focus()")
        await tab.press("ArrowRight")
        await tab.press("Enter")
        await tab.until("!document.getElementById('die').hidden")
        assert await tab.run("document.getElementById('die-title').textContent") == "Die 1"
        await tab.until("document.querySelectorAll('#die .regions button').length > 10")
        await tab.click("#die [data-kind=lost]")
        await tab.run("document.querySelector('#ideas button').click()")
        await tab.until(f"{DIGEST}.length === 2")
        first_digest, second_digest = await tab.run(DIGEST)
        assert first_digest == second_digest
        assert await tab.run("document.querySelector('.same').textContent") == "same bits as before"
        assert engine.plan.pod.lost >= {1}
        await tab.until("xdeepserve.shown.now.lost.includes(1)")
        await tab.until("document.querySelector('#event-list .fault')")
        assert not await tab.run(COVERS)
        assert tab.problems == []
        record = tmp_path / "saved.jsonl"
        record.write_text(await tab.run("xdeepserve.history.text({format: 'xdeepserve-page', version: 1})"))
        await open_records(tab, record, tmp_path)


async def open_records(tab: Tab, record: Path, folder: Path) -> None:
    """What the page has saved it opens again; of another version, or no record at all, it says so."""
    num_frames = len(record.read_text().splitlines()) - 1  # noqa: ASYNC240
    await tab.choose_file("#open", record)
    await tab.until("!document.getElementById('notice').hidden")
    assert f"{num_frames} frames" in await tab.run("notice.textContent")
    assert await tab.run("[xdeepserve.history.states.length, xdeepserve.shown.live]") == [num_frames, False]
    await tab.run("document.getElementById('map').focus()")
    await tab.press("Enter")
    await tab.until("!document.getElementById('die').hidden")
    assert await tab.run("document.querySelector('#die [data-kind=lost]').disabled")
    newer, strange = folder / "newer.jsonl", folder / "strange.jsonl"
    newer.write_text('{"software": "9.0", "format": "xdeepserve-page", "version": 2}\n{}\n')
    strange.write_text("a shopping list\n")
    for path, words in ((newer, "this page draws format 1"), (strange, "no record")):
        await tab.choose_file("#open", path)
        await tab.until(f"notice.textContent.includes('{words}')")
    assert await tab.run("xdeepserve.history.states.length") == num_frames
    assert tab.problems == []


HELLO = '{"software": "9.0", "format": "xdeepserve-page", "version": 1}'
ABORTED = r"""window.fetch = async () => new Response(
'data: {"choices": [{"index": 0, "text": "Once", "token_ids": [5, 6], "finish_reason": "abort"}]}'
+ '\n\ndata: [DONE]\n\n')"""


async def test_a_record_that_cannot_be_drawn_leaves_the_pod_in_view(serve: Serve, tmp_path: Path) -> None:
    async with serve("monolithic") as (address, _), chromium() as tab:
        await tab.open(address)
        await tab.until(SHOWN)
        whole = await tab.run("xdeepserve.history.text({}).split('\\n')[1]")
        for number, (frame, words) in enumerate(
            (
                ("{}", "line 2 is no frame: it has no number, or no parts"),
                ("null", "line 2 is no frame"),
                ('{"frame": 1, "parts": {"pod": {}}}', "the first one has no now"),
                (whole.replace('"dies":[[', '"dies":["'), "line 2 is no frame"),
                (whole.replace('"dies":', '"does":'), "pod has no dies of its kind"),
                (f'{whole}\n{{"frame": 2, "parts": {{"groups": null}}}}', "line 3 is no frame: groups"),
            )
        ):
            path = tmp_path / f"{number}.jsonl"
            path.write_text(f"{HELLO}\n{frame}\n{whole}\n")
            await tab.choose_file("#open", path)
            await tab.until(f"notice.textContent.includes('{words}')")
            assert await tab.run("xdeepserve.shown.live")
        assert tab.problems == []


async def test_an_answer_that_was_cut_off_has_no_digest(serve: Serve) -> None:
    async with serve("monolithic") as (address, _), chromium() as tab:
        await tab.open(address)
        await tab.until(SHOWN)
        await tab.run(ABORTED)
        await tab.click("#ideas button")
        await tab.until("document.querySelector('.digest .other')")
        assert "aborted after 2 tokens" in await tab.run("document.querySelector('.digest').textContent")
        assert await tab.run(f"{DIGEST}.length") == 0


async def _another(port: int, deployment: str, *overrides: str) -> TestServer:
    """A server of another pod on the same port."""
    server = TestServer(build_app(build_engine("tiny", deployment, "int8", overrides=overrides)), port=port)
    await server.start_server(shutdown_timeout=1.0)
    return server


async def test_a_server_that_goes_away_and_comes_back(serve: Serve) -> None:
    async with chromium() as tab:
        async with serve("monolithic") as (address, _):
            await tab.open(address)
            await tab.until(SHOWN)
        await tab.until("notice.textContent.includes('asking again')")
        assert await tab.run("xdeepserve.shown.pod.model") == "tiny"
        port = int(address.rstrip("/").rsplit(":")[-1])
        async with await _another(port, "colocated", "dies=2"):
            await tab.until("xdeepserve.shown.pod.dies.length === 2")
            assert await tab.run("notice.hidden")
            assert await tab.run("document.getElementById('who').textContent.includes('colocated')")
            await tab.run("document.getElementById('pause').click()")
        await tab.until("notice.textContent.includes('asking again')")
        async with await _another(port, "monolithic"):  # who looks at a moment keeps it
            await tab.until("notice.hidden")
            assert await tab.run("xdeepserve.shown.pod.dies.length") == 2
            await tab.run("document.getElementById('pause').click()")
            await tab.until("xdeepserve.shown.pod.dies.length === 1")
