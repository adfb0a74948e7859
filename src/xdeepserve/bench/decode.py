"""`xdeepserve bench decode`: tokens per second of greedy decoding, for a model and some batches.

Prompts of 8 tokens are completed by NEW_TOKENS tokens each; what the prompts and the first token take is
measured by itself and subtracted. Each row is the median of REPEATS. Where the model is a checkpoint
directory, its peers decode the same prompts in the same process: `transformers` in float32, if it is there,
and llama.cpp, if `llama_cpp` is installed and the directory has the model as GGUF (tools/make_gguf.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xdeepserve.bench.llama_cpp import LlamaCpp
from xdeepserve.bench.report import Row
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.llm import LLM

BATCHES = (1, 8, 32)
DEPLOYMENTS: tuple[tuple[str, ...], ...] = (
    ("monolithic",),
    ("colocated", "lockstep=true"),
    ("colocated", "lockstep=false"),
)
PROMPT_TOKENS, NEW_TOKENS = 8, 32
REPEATS = 3
CONTEXT = 256


def all_rows(model: str = "tiny") -> list[Row]:
    """One row per deployment and batch on all threads that this process may use; monolithic on one, too."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = _ours(model, "monolithic", 1) if count > 1 else []
    for deployment, *settings in DEPLOYMENTS:
        rows += _ours(model, deployment, count, settings)
    if importlib.util.find_spec("llama_cpp") is not None:
        rows += [row for path in sorted(Path(model).glob("*.gguf")) for row in _llama_cpp(path, count)]
    if importlib.util.find_spec("transformers") is not None and Path(model).is_dir():
        rows += _transformers(model, count)
    return rows


def decode_rate(generate: Callable[[int], object], batch: int) -> float:
    """Tokens per second behind the first. `generate(n)` makes n tokens of each sequence."""
    generate(2)
    rates = []
    for _ in range(REPEATS):
        times = []
        for count in (1, 1 + NEW_TOKENS):
            start = time.perf_counter()
            generate(count)
            times.append(time.perf_counter() - start)
        rates.append(batch * NEW_TOKENS / (times[1] - times[0]))
    return statistics.median(rates)


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Different token ids in each, none of them special."""
    return [[10 + (101 * i + 13 * j) % (vocab_size - 10) for j in range(PROMPT_TOKENS)] for i in range(batch)]


def _ours(model: str, deployment: str, threads: int, settings: Sequence[str] = ()) -> list[Row]:
    """Rows of this package: a deployment of a model with some settings."""
    overrides = [
        *settings,
        f"threads={threads}",
        f"max_model_len={CONTEXT}",
        f"scheduler.max_num_seqs={max(BATCHES)}",
    ]
    rows = []
    with LLM(model, deployment, overrides=overrides) as llm:
        for batch in BATCHES:
            ids = prompts(batch, llm.engine.vocab_size)

            def generate(count: int, ids: list[list[int]] = ids) -> object:
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                return llm.generate(ids, params)

            label = ", ".join([deployment, *settings])
            name = f"decode/{label}/int8/threads={threads}/batch={batch}"
            rows.append(Row(name, decode_rate(generate, batch), "tok/s", "measured"))
    return rows


def _llama_cpp(path: Path, threads: int) -> list[Row]:
    """llama.cpp, with the number of threads that suits it best: the faster of one and all."""
    rows = []
    for batch in BATCHES:
        best = 0.0
        for count in sorted({1, threads}):
            with LlamaCpp(path, count, batch, CONTEXT) as peer:
                ids = prompts(batch, peer.vocab_size)
                best = max(best, decode_rate(partial(peer.generate, ids), batch))
        name = f"decode/llama.cpp/{path.stem}/threads=1..{threads}/batch={batch}"
        rows.append(Row(name, best, "tok/s", "measured"))
    return rows


def _transformers(model: str, threads: int) -> list[Row]:
    """Hugging Face's implementation, float32 on the CPU."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = []
    for batch in BATCHES:
        ids = torch.tensor(prompts(batch, network.config.vocab_size))

        def generate(count: int, ids: Any = ids) -> object:
            with torch.no_grad():
                return network.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )

        name = f"decode/transformers/float32/threads={threads}/batch={batch}"
        rows.append(Row(name, decode_rate(generate, batch), "tok/s", "measured"))
    return rows
