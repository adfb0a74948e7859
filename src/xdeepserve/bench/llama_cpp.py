"""llama.cpp as a peer: greedy decoding of several sequences at once, by llama-cpp-python's basic calls."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xdeepserve.errors import InputError
from xdeepserve.model.canonical import Array

MIN_ROWS = 256  # in a batch


class LlamaCpp:
    """A GGUF file, loaded, for at most `max_seqs` sequences of `context` tokens.

    `generate` decodes all prompts together, one token of each in every step.
    """

    def __init__(self, path: Path, threads: int, max_seqs: int, context: int) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._silence: Any = self._lib.llama_log_callback(lambda level, text, data: None)
        self._lib.llama_log_set(self._silence, None)
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(
            os.fsencode(path), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise InputError(f"{path}: llama.cpp cannot load it")
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * max_seqs, max_seqs
        self._max_rows = params.n_batch = params.n_ubatch = max(MIN_ROWS, max_seqs)
        params.n_threads = params.n_threads_batch = threads
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise InputError(f"{path}: llama.cpp cannot run it")
        self.vocab_size = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._batch = self._lib.llama_batch_init(self._max_rows, 0, 1)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` greedy tokens of each prompt."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        rows = [(seq, pos, token) for seq, ids in enumerate(prompts) for pos, token in enumerate(ids)]
        if len(rows) > self._max_rows:
            raise InputError(f"llama.cpp: prompts of {len(rows)} tokens, at most {self._max_rows}")
        lengths = [len(ids) for ids in prompts]
        ends = np.cumsum(lengths) - 1
        tokens = [self._decode(rows, [int(end) for end in ends])]
        for step in range(num_tokens - 1):
            rows = [(seq, lengths[seq] + step, token) for seq, token in enumerate(tokens[-1])]
            tokens.append(self._decode(rows, list(range(len(rows)))))
        return [[step[seq] for step in tokens] for seq in range(len(prompts))]

    def _decode(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Run rows of (sequence, position, token); the most probable token after each of the wanted ones."""
        batch = self._batch
        for i, (seq, pos, token) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, pos
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, 0
        for i in wanted:
            batch.logits[i] = 1
        batch.n_tokens = len(rows)
        if self._lib.llama_decode(self._context, batch):
            raise InputError(f"llama.cpp failed on a batch of {len(rows)} rows")
        return [int(self._logits(i).argmax()) for i in wanted]

    def _logits(self, row: int) -> Array:
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))
