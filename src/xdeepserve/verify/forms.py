"""Rows with JSON answers of a schema: grammar masks on every deployment, and in the reference."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.roles import has_expert_dies
from xdeepserve.engine.dp.grammar import Grammars
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.steer import grammars_of
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.verify.case import Case, few_blocks

FORM_TOKENS = 40
FORM = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "mood": {"enum": ["glad", "sad"]},
            "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "mood", "ages"],
        "additionalProperties": False,
    }
)


def forms(names: Sequence[Kind], dies: int, config: ModelConfig) -> list[Case]:
    """List the rows with JSON answers: every deployment with each number of drafts, and masks beside
    preemption, swapping, chunks and the rest."""
    most = 2 if config.num_nextn_predict_layers else 0
    drafts, tight = f"mtp={most}", few_blocks(config)
    swap = ("cache.num_host_blocks=64", "cache.load=always", "cache.preemption=swap")
    rows = [
        Case(name, f"JSON, {mtp} drafts", (f"mtp={mtp}",), form=True)
        for name in names
        for mtp in range(most + 1)
    ]
    rows += [
        Case("monolithic", "JSON, preempted", (drafts, *tight), crowded=True, form=True),
        Case("monolithic", "JSON, swapped", (drafts, *tight, *swap), crowded=True, form=True),
        Case("monolithic", "JSON, prefill in chunks", ("scheduler.max_num_batched_tokens=16",), form=True),
        Case("monolithic", "JSON, layers in one call", (drafts, "lockstep=true"), form=True),
        Case("colocated", "JSON, in lockstep", (f"dies={dies}", drafts, "lockstep=true"), form=True),
        Case("pd", "JSON, planned ahead", (drafts, "execution.overlap=true"), crowded=True, form=True),
    ]
    return rows + [
        Case(name, "JSON, dataflow", (drafts, "dataflow=true"), form=True)
        for name in names
        if has_expert_dies(name)
    ]


def is_spelt(checkpoint: Checkpoint) -> bool:
    """Tell whether a model has the tokenizer and the end-of-sequence token that a JSON answer needs."""
    return bool(load_tokenizer(checkpoint.directory) and checkpoint.config.eos_token_ids)


def form_grammars(checkpoint: Checkpoint) -> Grammars:
    """Build the grammars of a model. RequestError if it is not `is_spelt`."""
    return grammars_of(checkpoint.config, load_tokenizer(checkpoint.directory))


def masks(grammars: Grammars, token_ids: Sequence[int]) -> list[Array]:
    """List FORM's mask before each token of an answer, bool [vocab] each.

    The list ends early at a token that the mask forbids.
    """
    matcher, found = grammars.matcher(FORM), []
    for token_id in token_ids:
        allowed = matcher.allowed()
        assert allowed is not None  # there is no reasoning to wait for
        found.append(allowed)
        if not matcher.take(token_id):
            break  # the masks that are missing make the rows differ
    return found
