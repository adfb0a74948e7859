"""Every example runs as a user would run it, and prints what its text promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WIDTH = 100  # columns of what examples print; errors are one line, as users meet them
ERROR = re.compile(r"\w+Error: ")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Lines, or parts of lines, that must appear in this order.
PROMISES = {
    "01_global_memory": [
        "planned 8,388,864 bytes for 4 dies",
        "node 16 is s01.c0.d0: metadata [0, 64), managed [64, 64), app [64, 2097216)",
        # 0.5 us startup, 1 us to issue, 1 us to another server, and 16 bytes.
        "die 0 stored 16 bytes at (16, 64); now 2501 ns",
        "die 16's own memory says: b'hello from die 0'",
        "die 0 loads: b'HELLO from die 0'",
        # 98304 bytes at 34 GB/s are 2891.3 ns: one chunk takes 2 of these, eight take 9 and not 16.
        "98304     1      1     7283             7283",
        "786432     1      8    27522            47761",
        # Twice the bytes with twice the cores: the same time.
        "1572864     2      8    27522            47761",
        "(+1000 ns)",
        "die 1: flag bytes 01 00 00 00 00 00 00 00 19 00 00 00 00 00 00 00",
        "= event 1, 25 bytes: b'the KV cache of a request'",
        "AddressError: node 16: 8 bytes at offset 2097212 do not lie within one area",
        "DeadlineError: receive: deadline passed at 361921 ns: rank 1 waits for peer 0, "
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
        "rank 0 token 0: [1.513671875, 1.513671875, 0.7568359375, -1.513671875, 3.0, -0.37841796875, 0.0,",
        "\n                 1.513671875]",
        "rank 1: no tokens, but it took part",
        "rank 2 token 0: [7.5, 2.474609375, ",
        "done at 75662 ns of virtual time",
    ],
    "03_send_receive": [
        "101 bytes = 4 chunks of 32; a ring of 3 slots",
        "send step 1:",
        "send step 2:",
        "slot 0: b'The KV cache of a request, which'",
        "send step 3:",
        "tail of core 0: 0700000000000000 0100000000000000 0100000000000000 65000000 02000000",
        "receive step 5:",
        "receive step 6:",
        "receive step 7:",
        "ack of core 1: 0700000000000000 0200000000000000 0200000000000000 65000000 02000000",
        # The fourth chunk waited for the first one's slot.
        "slot 0: b'ring.V cache of a request, which'",
        "send step 4:",
        "= event 7, chunk 4, position 4, message of 101 bytes by 2 core(s)",
        "6512 ns  send step 8:",
        "equal: True",
        "pointer 448 = the sender's kv region at 448",
        "equal: True; ring untouched: True",
        "send_async has returned; acknowledged: False",
        "receiver looks again; arrived: True",
        "sender looks again; acknowledged: True",
        # XDS Figure 5: under 20 us below 1 MB with 2 AIV cores, more than 2.5 times faster with 48 at 9 MB.
        "MTE,  2 AIV       4.0      5.2     19.7    143.6",
        "MTE, 48 AIV       4.0      4.6     10.0     55.8",
        "AddressError: send: [448, 704) leaves the app area [448, 576)",
        "DeadlineError: send: deadline passed at 100502 ns: rank 0 waits for peer 1, "
        "field ack chunk ID of event 1: expected 1, seen 0",
        "ProtocolError: receive: rank 1 expects event 3, but the field of peer 0, core 0 says event 4",
    ],
    "04_a2e_trampoline": [
        "attention 0 = die  0: trampoline is expert 0",
        "expert 3    = die 19: no trampoline",
        "attention 0: A2E steps 1-4:",
        "expert 0: A2E step 5: field 01000000 00000000 40000000 00000000 02000000",
        "= attention 0: event 1, 2 tokens",
        "expert 0: A2E steps 6-7:",
        "expert 0: A2E' steps 1-4: forwards [1, 1, 0, 1, 1] copies",
        "expert 3: A2E' steps 5-7:",
        "expert 3 has expert 3, token 0 slot 1, int8 [64, 64, 32, -64, 127, -16, 0, 64]",
        "expert 3: E2A steps 1-7:",
        "expert 0: E2A' steps 1-2:",
        "attention 0: E2A' steps 5-7:",
        "attention 1 token 0 (exactly x 4.25): [8.5, 4.28125,",
        "equal bits: True",
        "1 with trampolines, 5 without",
    ],
    "05_continuous_batching": [
        "at most 16 rows and 3 sequences in a step; 5 KV blocks of 16 positions",
        # D came last but goes first; B's prompt takes what the others leave of each step's rows.
        "16 rows 3 blocks  D prefill [0,3), A prefill [0,6), B prefill [0,7)",
        "16 rows 4 blocks  D decode [3,4), A decode [6,7), B prefill [7,21)",
        "15 rows 5 blocks  D decode [4,5), A decode [7,8), B prefill [21,34)",
        "3 rows 5 blocks  D decode [5,6), A decode [8,9), B decode [34,35)",
        "no block is left: B gives up its 42 positions",
        # Its first two blocks are still in the cache.
        "B again [32,43)",
        "C prefill [0,12)",
        "blocks in use: 0 of 5",
        "29 steps, 1 preemption(s)",
        "   2 steps of 16 rows",
        *["same tokens and logits: True"] * 4,
        "planned when the one before has ended",
        "same bits: True",
        "planned while the one before runs",
        "same bits: True",
    ],
    "06_prefix_cache": [
        "A: 45 tokens, 0 found in the cache, 48 rows computed in all",
        "B: 45 tokens, 32 found in the cache, 16 rows computed in all",
        "C: 43 tokens, 32 found in the cache, 26 rows computed in all",
        "of A's beginning 0 blocks are in HBM and 2 in host DRAM",
        "A again: 45 tokens, 32 found in the cache, 16 rows computed in all",
        "the same tokens and logits as the first time: True",
        "blocks in use: 0 of 6",
        "after its first turn RTC keeps 2 blocks under the key 'a talk'",
        "another prompt needs all of HBM: 0 left there, 2 in host DRAM",
        "while it waits, 2 blocks are fetched",
        "another conversation of that name finds 0",
    ],
    "07_mtp": [
        "main model '<think>'                          prompt",
        "2 of 2 accepted",
        "--- 32 tokens at temperature 0",
        "no drafts                   32 steps  accepted -",
        "one draft",
        "same bits: True",
        "two, one layer used twice",
        "same bits: True",
        "two, a layer for each",
        "same bits: True",
        "--- 32 tokens at temperature 1",
        *["same bits: True"] * 4,
        "tokens per step  1 + p1 (+ p1 p2)",
        "naive: the host, when it has seen the step's tokens",
        "pipelined: all launched ahead, sampling on the die",
        "pipelined, two drafts",
    ],
    "08_pd": [
        "step 3  prefill DP0: request 0 lies in its blocks [0, 1, 2]",
        "step 6  decode DP0: room for request 0,",
        "step 8  prefill DP0: frees the blocks of request 0",
        "1 prefill steps, 6 decode steps",
        "job executor            1 request arrives at the job executor",
        "decode 0 die 0          7 DistFlow moves the bytes of request 0",
        "prefill 0 die 0         8 DP group learns of the end",
        "the same tokens and logits as on one die: True",
        "room for request 0",
        "goes on with request 0",
        "room for request 1",
        "blocks in use at the end: 0",
        "by request  prefill ends at",
        "by layer    prefill ends at",
        "cm384  prefill on s00.c0.d0, 24 AIC cores, KV over ub: first token after 1185.0 us",
        "910b   prefill on s48.c0.d0, 20 AIC cores, KV over roce: first token after 1464.0 us",
        "the same tokens and logits as on one die: True",
        "no carrier",
        "decode 0: 0 steps, its link is avoided",
        "decode 1: 6 steps, its link is well",
        "the same tokens and logits as on one die: True",
    ],
    "09_moe_attention": [
        "2 DP domains of 2 attention dies, 4 dies of routed experts, 1 of the shared one",
        "attention with a DP group",
        "experts [0, 1, 2, 3]",
        "experts the shared one",
        "MLAProlog",
        "A2E receive domain 1 microbatch 0",
        "MoE         domain 1 microbatch 0",
        "36 received, 36 computed, 36 sent",
        "the same tokens and logits as on one die: True",
        "launches late at random  dataflow=false  a request takes  198.8 ms",
        "launches late at random  dataflow=true   a request takes  175.4 ms",
        "different digests: 1",
    ],
    "10_superpod": [
        "3 DP domains of 10 attention dies, 16 dies of routed experts, 2 of the shared one",
        "a step: 348 A2E and as many E2A, 232,464 fields",
        "attention die 0 holds a token at 128, for experts",
        "its field at die 30, its trampoline: event 348,",
        "its copy at die ",
        "60 requests, 3 steps: 19.1 ms a step",
        "the bits of one die: 60 of 60",
    ],
    "11_int8": [
        "before activations",
        "after  activations",
        "smoothing evens the activations out: True",
        "smoothing lowers the error: True",
        "rtn ",
        "cloudmatrix ",
        "smoothquant+gptq is no worse than rounding to the nearest on weights: True",
        "smoothquant+gptq is no worse than rounding to the nearest on activations: True",
        "kv_a_proj_with_mqa",
    ],
    "12_experts": [
        "stories     |",
        "every domain is skewed, the hottest expert has at least 1.5 times the mean: True",
        "domains are more skewed than their sum: True",
        " upon[",
    ],
    "13_eplb": [
        "Step 1: every die counts the tokens of each expert",
        "  select: [",
        "  place:  die 7, experts [28, 29, 30, 31], replica of ",
        "times the mean instead of ",
        "phase 1 prefetch ",
        "phase 2 disable, with the next step",
        "phase 3 load ",
        "phase 4 restore, with the next step",
        "  die 0's rows 0 to 7 that chose it go to [",
        "is the primary byte for byte: True",
        "  the hottest die of every layer has less to do: True",
        "reconfigurations; the same tokens and logits as on one die: True",
    ],
    "15_living_pod": [
        "[AAAA............]  at rest",
        "A = te (ready, 16 sequences)",
        "[AAAABBBB........]  te 1 has joined: 10.2 MB from its peer in 116 us",
        "[....AAAA........]  te has been removed: 16 sequences go on elsewhere",
        "now [219]",
        "[BBBBAAAA........]  te 2 has joined, from storage in 1.7 ms",
        ": equal",
        "times so far, on TEs that are gone included",
        ": equal",
        "RequestError: TE te 2 cannot leave: it is the only one",
        "die 3: te 2 of tiny, die 4: te of tiny-r1",
        ": equal",
        "[AAAA............]  the second model has left",
    ],
    "14_kernels": [
        "column  1, k 0 to 3: 38393a3b = [-72, -71, -70, -69], each + 128",
        "less 128 times the row's sum:       -623",
        "the kernel says:                    -623",
        "every column as int64 arithmetic has it: True",
        "rows with the same bits alone and among 64: 64 of 64",
        "the NumPy reference, k after k: True",
        "as the same weights in float32: True",
        "XDEEPSERVE_KERNELS=portable                eddb43925cc84eed the same",
        "NUMBA_CPU_NAME=generic                     eddb43925cc84eed the same",
        "row 5 of tile 1 of that block",
        "as quantising the norm of the row gives them: True",
        "--- INT8, 1024 x 1024, one core",
        "--- float32, 1024 x 1024, one core",
        "64 rows #",
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
    wide = [line for line in done.stdout.splitlines() if len(line) > WIDTH and not ERROR.match(line)]
    assert not wide
    rest = done.stdout
    for promise in PROMISES[path.stem]:
        assert promise in rest, f"{path.name} does not print, or not in this order: {promise}"
        rest = rest.split(promise, 1)[1]
