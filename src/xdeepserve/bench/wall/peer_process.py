"""Another engine in a process of its own, started by `peers.py` with the Python of its environment.

    python -I peer_process.py ENGINE PATH THREADS SEQUENCES CONTEXT

This package is not installed there, so only the standard library and the engine are imported. The process
writes a JSON object a line: first {"version": ...}, then, for each {"prompts": [[id, ...], ...],
"num_tokens": n} on standard input, {"num_tokens": the number of all generated tokens}. The engine's own
output goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


class LlamaCpp:
    """A GGUF file in llama.cpp's server, by the `xllamacpp` wheel. All prompts are one call."""

    version = "xllamacpp"

    def __init__(self, path: str, threads: int, num_seqs: int, context: int) -> None:
        lib: Any = importlib.import_module("xllamacpp")
        params = lib.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context * num_seqs, num_seqs, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = lib.Server(params)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Generate greedy tokens of all prompts, and count them."""
        request = {"prompt": prompts, "n_predict": num_tokens, "temperature": 0.0, "ignore_eos": True}
        reply = self._server.handle_completions({**request, "cache_prompt": False})
        # Its usage counts the first prompt only; whoever stops at the limit has made that many.
        return num_tokens * sum(choice["finish_reason"] == "length" for choice in reply["choices"])


class VLLM:
    """A checkpoint directory in vLLM, in BF16."""

    version = "vllm"

    def __init__(self, path: str, threads: int, num_seqs: int, context: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
        self._lib: Any = importlib.import_module("vllm")
        self._llm = self._lib.LLM(
            model=path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_seqs=num_seqs,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Generate greedy tokens of all prompts, and count them."""
        params = self._lib.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Transformers:
    """A checkpoint directory in Hugging Face's implementation."""

    version, dtype = "transformers", "float32"

    def __init__(self, path: str, threads: int, num_seqs: int, context: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        dtype = getattr(self._torch, self.dtype)
        self._network = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Generate greedy tokens of all prompts, and count them."""
        ids = self._torch.tensor(prompts)
        with self._torch.no_grad():
            made = self._network.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return int(made.shape[0] * (made.shape[1] - ids.shape[1]))


class TransformersBF16(Transformers):
    """A checkpoint directory in Hugging Face's implementation, with weights in BF16."""

    dtype = "bfloat16"


ENGINES: dict[str, type[LlamaCpp | VLLM | Transformers]] = {
    "llama.cpp": LlamaCpp,
    "vllm/bfloat16": VLLM,
    "transformers/float32": Transformers,
    "transformers/bfloat16": TransformersBF16,
}


def version(name: str) -> str:
    """Return the version of the package that has a module; "?" if it is unknown."""
    packages = importlib.metadata.packages_distributions().get(name, [name])
    try:
        return importlib.metadata.version(packages[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"


def answer(out: TextIO, engine: str, path: str, threads: str, num_seqs: str, context: str) -> None:
    """Load the engine, report the version, and serve until standard input ends."""
    peer = ENGINES[engine](path, int(threads), int(num_seqs), int(context))
    print(json.dumps({"version": version(peer.version)}), file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        count = peer.generate(job["prompts"], job["num_tokens"])
        print(json.dumps({"num_tokens": count}), file=out, flush=True)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints must not stand between the replies
    engine, path, *numbers = sys.argv[1:]
    answer(replies, engine, str(Path(path)), *numbers)


if __name__ == "__main__":
    main()
