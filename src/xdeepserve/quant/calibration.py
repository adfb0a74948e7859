"""Text for calibrating quantisation: a user's file, else the package's own corpus, else random token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xdeepserve.corpus import EXAMINED, sample
from xdeepserve.corpus.sample import paragraphs
from xdeepserve.errors import InputError
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.sampling import philox4x32
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer

MAX_TOKENS = 512  # of one text
RANDOM_TOKENS = 96
SEED = 7

Sequences = Callable[[int], "list[int] | None"]


def calibration_sequences(checkpoint: Checkpoint, file: Path | None = None) -> Sequences:
    """Return a function from a text's number to its token ids, or to None behind the last text (only a file
    ends).

    Texts are paragraphs of `file`, else training samples of every domain in turn, else seeded random ids for
    a checkpoint without a tokenizer. Raises InputError.
    """
    tokenizer, config = load_tokenizer(checkpoint.directory), checkpoint.config
    limit = min(MAX_TOKENS, config.max_position_embeddings)
    if tokenizer is None:
        if file is not None:
            raise InputError(
                f"{checkpoint.name} has no tokenizer.json, so it cannot read --calibration {file}"
            )
        return lambda i: _random_ids(i, min(RANDOM_TOKENS, limit), config.vocab_size)
    encode = _encoder(tokenizer, config.vocab_size, limit)
    if file is None:
        return lambda i: encode(_corpus_text(i))
    texts = paragraphs(file, "--calibration")
    return lambda i: encode(texts[i]) if i < len(texts) else None


def _encoder(tokenizer: Tokenizer, vocab_size: int, limit: int) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text)[:limit]
        if max(ids, default=0) >= vocab_size:
            raise InputError(
                f"the tokenizer makes token id {max(ids)}, but the model knows {vocab_size} tokens"
            )
        return ids

    return encode


def _corpus_text(i: int) -> str:
    domain = EXAMINED[i % len(EXAMINED)]
    one = sample(domain, "train", SEED, i)
    return one.prompt + one.answer


def _random_ids(stream: int, length: int, vocab_size: int) -> list[int]:
    return [philox4x32((i, stream, 0, 3), (0, SEED))[0] % vocab_size for i in range(length)]
