"""Write the tokenizer files of the `tiny-random` preset: a byte-level BPE with DeepSeek's special tokens.

Token ids: 0..2 begin, end and padding; 3..258 the bytes in order; 259..262 roles and thinking; the rest,
up to 320, frequent pairs of English, so that merging and detokenising meet tokens of several letters.

    python tools/make_tiny_random_tokenizer.py
"""

from __future__ import annotations

import json
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "src" / "xdeepserve" / "model" / "preset_files" / "tiny-random"
BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL = {BEGIN: 0, END: 1, PAD: 2, USER: 259, ASSISTANT: 260}
PLAIN_ADDED = {"<think>": 261, "</think>": 262}
VOCAB_SIZE = 320
PAIRS = (
    " t|h e|i n|e r|a n|r e|o n|a t|e n|o u| a|i s|i t| w|o r|e s|in g| s| c|a l|a r|s t| th| o|e d| b|l e|"
    " f|n d|u r|o w|i c|an d| the|v e|l l| d| p|r o| m|o f|t o| of| to| and| in|h a|c h|g h|o m|k e|a y|l y|"
    "ion|at ion| ha| wh"
)

# Calls and results of tools are in Hermes' notation, in plain text: the vocabulary has no tags for them.
CHAT_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] %}"
    "{% endif %}{% endfor %}"
    "{% if tools %}{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + '# Tools' %}"
    "{% for tool in tools %}{% set ns.system = ns.system + '\\n' + (tool['function'] | tojson) %}{% endfor %}"
    "{% endif %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{% set arguments = call['function']['arguments'] %}"
    "{{ '<tool_call>{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<｜User｜><tool_response>' + message['content'] + '</tool_response>' }}"
    "{% elif message['role'] != 'system' %}{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The visible character that stands for each byte in byte-level BPE (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def vocabulary() -> tuple[dict[str, int], list[str]]:
    """Token -> id, and the merges in order."""
    vocab = {character: 3 + byte for byte, character in enumerate(byte_alphabet())}
    merges = []
    for pair in PAIRS.split("|"):
        left, right = split_pair(pair, vocab)
        merges.append(f"{left} {right}")
        vocab[left + right] = 263 + len(merges) - 1
    return vocab, merges


def split_pair(pair: str, vocab: dict[str, int]) -> tuple[str, str]:
    """'x y' is x and y; ' xy' or 'xyz' is the longest known beginning and its rest."""
    if " " in pair[1:]:
        left, right = pair[0] + pair[1:].split(" ")[0], pair[1:].split(" ")[1]
        return left.replace(" ", "Ġ"), right
    text = pair.replace(" ", "Ġ")
    end = max(n for n in range(1, len(text)) if text[:n] in vocab and text[n:] in vocab)
    return text[:end], text[end:]


def added_token(content: str, token_id: int, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": content, **flags}


def main() -> None:
    vocab, merges = vocabulary()
    fill = {f"<｜place▁holder▁no▁{n}｜>": n for n in range(263 + len(merges), VOCAB_SIZE)}
    added = [added_token(text, token_id, True) for text, token_id in {**SPECIAL, **fill}.items()]
    added += [added_token(text, token_id, False) for text, token_id in PLAIN_ADDED.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(str(token["id"]))),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**vocab, **SPECIAL, **PLAIN_ADDED, **fill},
            "merges": merges,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": BEGIN, "special": True},
        "eos_token": {"__type": "AddedToken", "content": END, "special": True},
        "pad_token": {"__type": "AddedToken", "content": PAD, "special": True},
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (DIRECTORY / name).write_text(
            json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
