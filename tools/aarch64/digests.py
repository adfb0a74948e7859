"""Digests of what a model answers on this computer, a line for each, to compare with another computer's.

    python tools/aarch64/digests.py

Answers to three prompts with the logarithms of their probabilities, then the rows of `verify --quick`, in
fp32 and in int8. What this computer is, and what is being done, goes to stderr: stdout is for digests.
"""

import hashlib
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm
from numba.core.dispatcher import Dispatcher

from xdeepserve import LLM, SamplingParams
from xdeepserve.llm import digest
from xdeepserve.model.weights import RECIPES
from xdeepserve.verify.matrix import MatrixRow, verify

PROMPTS = ("Once upon a time", "12 + 30 =", "The capital of France is")
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
# Products of vectors in machine code: registers of aarch64 (NEON), and of x86-64 (AVX and AMX).
PRODUCT = re.compile(
    r"^\s+(\w*(?:mul|ml[as]|madd|msub|dot|dpb)\w*)\s.*(?:\bv\d+\.\d|[yzt]mm\d)", re.MULTILINE
)
BEGAN = time.monotonic()


def note(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)


def note_computer() -> None:
    note(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}")
    note(f"Numba {numba.__version__}, llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}")
    present = [name for name, has in sorted(llvm.get_host_cpu_features().items()) if has]
    note(f"LLVM sees {llvm.get_host_cpu_name()}: {', '.join(present)}")


def note_products() -> None:
    """Which instructions multiply vectors in what was compiled now; the cache keeps no text."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("xdeepserve.")]
    kernels = {each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)}
    found: Counter[str] = Counter()
    num_compiled = 0
    for kernel in kernels:
        for types in kernel.stats.cache_misses:
            found.update(PRODUCT.findall(kernel.inspect_asm(types)))
            num_compiled += 1
    names = ", ".join(f"{count} {name}" for name, count in found.most_common())
    note(f"{num_compiled} kernels were compiled; products of vectors in them: {names or 'none'}")


def answers() -> Iterator[str]:
    """A line for each prompt, and one for the logits of all."""
    for recipe in RECIPES:
        note(f"generate, {recipe}")
        with LLM("tiny", precision=recipe) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            (choice,) = output.outputs
            said = [choice.token_ids, [{i: each.logprob for i, each in at.items()} for at in choice.logprobs]]
            yield f"{hashlib.sha256(repr(said).encode()).hexdigest()[:24]} {recipe} generate {prompt!r}"
        yield f"{digest(outputs)[7:31]} {recipe} generate, tokens and logits of all"


def rows() -> Iterator[str]:
    """A line for each row of `verify --quick`, the reference's by NumPy among them."""

    def report(row: MatrixRow, done: int, total: int) -> None:
        note(f"verify, {done}/{total} {row}")

    for row in verify("tiny", report=report, is_quick=True):
        yield f"{row.digest[7:31]} {row}"


def main() -> None:
    note_computer()
    for part in (answers, rows):
        for line in part():
            print(line, flush=True)
    note_products()


if __name__ == "__main__":
    main()
