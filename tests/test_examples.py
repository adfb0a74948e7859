"""Every example runs as a user would run it, and prints what its text promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Lines, or parts of lines, that must appear in this order.
PROMISES = {
    "01_global_memory": [
        "planned 8,388,864 bytes for 4 dies",
        "node 16 is s01.c0.d0: metadata [0, 64), managed [64, 64), app [64, 2097216)",
        # 3 us startup, 1 us to issue, 1 us to another server, and 16 bytes.
        "die 0 stored 16 bytes at (16, 64); now 5001 ns",
        "die 16's own memory says: b'hello from die 0'",
        "die 0 loads: b'HELLO from die 0'",
        # 98304 bytes at 34 GB/s are 2891.3 ns: one chunk takes 2 of these, eight take 9 and not 16.
        "98304     1      1     9783             9783",
        "786432     1      8    30022            50261",
        # Twice the bytes with twice the cores: the same time.
        "1572864     2      8    30022            50261",
        "(+1000 ns)",
        "die 1: flag bytes 01 00 00 00 00 00 00 00 19 00 00 00 00 00 00 00",
        "= event 1, 25 bytes: b'the KV cache of a request'",
        "AddressError: node 16: 8 bytes at offset 2097212 do not lie within one area",
        "DeadlineError: receive: deadline passed at 408630 ns: rank 1 waits for peer 0, "
        "field event ID: expected 2, seen 1",
    ],
    "02_dispatch_combine": [
        "rank 2 = die s01.c0.d0, experts [2, 3], 1 token(s)",
        "dispatch step 1:",
        "dispatch step 2:",
        "dispatch step 3:",
        "00000000 00000000 01000000 0683c13c | 7f 2a 15 d6 55 f5 00 2a",
        "= expert 0, token 0, slot 1, scale 0.023622, int8 [127, 42, 21, -42, 85, -11, 0, 42]",
        "dispatch step 4:",
        "dispatch step 5:",
        "from rank 0: 0100000000000000 0003000000000000 04000000 000000000000000000000000",
        "= event 1, pointer 768, 4 token(s)",
        "dispatch step 6-7:",
        "row 3: expert 3, token 2 slot 1, int8 [42, 127, 21, -42, 85, -11, 0, 42]",
        "num_tokens_per_rank = [4, 0, 1]",
        "combine step 3:",
        "(8 x bfloat16)",
        "combine step 5:",
        "combine step 6-7:",
        # token [1, 1, .5, -1, 2, -.25, 0, 1]: 0.75 x (expert 0: x 1) + 0.25 x (expert 2: x 3), nearly 1.5 x
        "rank 0 token 0: [1.513671875, 1.513671875, 0.7568359375, -1.513671875, 3.0, -0.37841796875, 0.0, ",
        "rank 1: no tokens, but it took part",
        "rank 2 token 0: [7.5, 2.474609375, ",
        "done at 53211 ns of virtual time",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_runs_and_keeps_its_promises(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rest = done.stdout
    for promise in PROMISES[path.stem]:
        assert promise in rest, f"{path.name} does not print, or not in this order: {promise}"
        rest = rest.split(promise, 1)[1]
