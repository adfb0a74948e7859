"""lm-eval through its API models, on questions of its own: log likelihoods, generation, chats."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval
from features import BASE_URL, MODEL, TOKENIZER, feature, version
from lm_eval.tasks import TaskManager

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def evaluated(kind: str, path: str, task: str, **more: object) -> float:
    with tempfile.TemporaryDirectory() as folder:
        docs = [{"question": f"{i} plus 1 is", "choices": [f" {i + 1}", f" {i}"]} for i in range(8)]
        file = Path(folder, "docs.jsonl")
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
            Path(folder, f"{name}.yaml").write_text(text.format(file=file))
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args={
                "model": MODEL,
                "base_url": f"{BASE_URL}{path}",
                "tokenizer": TOKENIZER,
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_length": 1024,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=folder),
            bootstrap_iters=0,
            **more,
        )
    return found["results"][task]


version("lm-eval")


@feature("text", "local-completions, log likelihoods")
def _() -> None:
    assert 0 <= evaluated("local-completions", "/v1/completions", "choices")["acc,none"] <= 1


@feature("text", "local-completions, generate")
def _() -> None:
    assert "exact_match,none" in evaluated("local-completions", "/v1/completions", "answers")


@feature("chat", "local-chat-completions")
def _() -> None:
    path = "/v1/chat/completions"
    assert evaluated("local-chat-completions", path, "answers", apply_chat_template=True)
