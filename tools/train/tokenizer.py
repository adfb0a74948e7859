"""Train the byte-level BPE tokenizer of the trained model on its corpus and write its files.

Digits are tokens of their own, so that sums can be worked digit by digit. The chat template writes DeepSeek's
format; a reply's reasoning is left out of later turns, as DeepSeek-R1's template does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from xdeepserve.corpus import DOMAINS, chat, sample

VOCAB_SIZE = 1280
SAMPLES_PER_DOMAIN = 2000
# Hidden when text is decoded; the other tokens of the format are part of what the model says.
HIDDEN = (chat.BEGIN, chat.END, chat.PAD, chat.USER, chat.ASSISTANT)
SAID = (
    chat.THINK,
    chat.END_THINK,
    chat.CALLS,
    chat.END_CALLS,
    chat.CALL,
    chat.SEPARATOR,
    chat.END_CALL,
    chat.OUTPUT,
    chat.END_OUTPUT,
)

CHAT_TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages if message['role'] == 'system' -%}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] -%}
{%- endfor -%}
{%- if tools -%}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + '## Tools' -%}
{%- for tool in tools -%}
{%- set function = tool['function'] -%}
{%- set ns.system = ns.system + '\\n### ' + function['name'] + '\\n' + (function['description'] or '') + '\\n' + ((function['parameters'] or {}) | tojson) -%}
{%- endfor -%}
{%- endif -%}
{{- bos_token + ns.system -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- if loop.last and add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
{%- elif message['role'] == 'assistant' -%}
{%- if loop.index0 == 0 or loop.previtem['role'] != 'tool' -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
{%- if message['content'] -%}{{- message['content'].split('</think>')[-1] -}}{%- endif -%}
{%- if message['tool_calls'] -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in message['tool_calls'] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' -}}
{{- (arguments if arguments is string else arguments | tojson) + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- eos_token -}}
{%- elif message['role'] == 'tool' -%}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}
{%- elif message['role'] != 'system' -%}
{{- raise_exception('unknown role ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
"""


def texts() -> Iterator[str]:
    """Training text, every domain the same number of samples."""
    for domain in DOMAINS:
        for index in range(SAMPLES_PER_DOMAIN):
            one = sample(domain, "train", 0, index)
            yield one.prompt + one.answer


def train_tokenizer(directory: Path, max_length: int) -> Tokenizer:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; the same bytes every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [*HIDDEN, *SAID]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in HIDDEN
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": chat.BEGIN,
        "eos_token": chat.END,
        "pad_token": chat.PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in (("tokenizer.json", raw), ("tokenizer_config.json", config)):
        text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return Tokenizer.from_str(json.dumps(raw))
