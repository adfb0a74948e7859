"""Typical mistakes on the command line and in files: the line that each is answered with, word for word."""

import argparse
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xdeepserve.bench.command import SUITES
from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.cli import COMMANDS, build_parser, main
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.resolve import PRESETS
from xdeepserve.engine.deploy.roles import DEPLOYMENTS
from xdeepserve.errors import InputError
from xdeepserve.golden.vectors import Manifest
from xdeepserve.hw import fault_kinds
from xdeepserve.hw.faults import Fault
from xdeepserve.jobs.training_text import TrainingLine
from xdeepserve.model.presets import ALIASES, ConfigOnly, preset_name, resolve_model
from xdeepserve.platform.cluster import Cluster
from xdeepserve.platform.made_traffic import MadeTraffic
from xdeepserve.reading import Document, read_line

SCREEN = 60  # lines of a help
KINDS = ", ".join(sorted(DEPLOYMENTS))
FAULTS = ", ".join(sorted(fault_kinds.KINDS))

FILES = {
    "field.toml": 'kind = "pd"\n\n[decode]\ncuont = 2\n',
    "values.toml": 'kind = "pdd"\n[decode]\ncount = "two"\n',
    "list.toml": 'kind = "mixed"\n[[te]]\n\n[[te]]\nrole = "decoding"\ndies = "4"\nharware = "910b"\n',
    "section.toml": 'kind = "pd"\ndecode = 3\n',
    "unquoted.toml": "kind = pd\n",
    "kindless.toml": "dies = 4\n",
    "json.toml": '{"kind": "pd"}\n',
    "bytes.toml": b"kind = \xff\n",
    "faults.toml": '[[fault]]\nat_us = 1.0\ndie = 0\nkind = "lst"\n',
    "when.toml": '[[fault]]\nat_us = "soon"\ndei = 0\nkind = "lost"\n',
    "one-fault.toml": '[fault]\nat_us = 1.0\ndie = 0\nkind = "lost"\n',
    "place.toml": '[[fault]]\nat_us = 10\ndie = 99\nkind = "lost"\n',
    "code.toml": '[[fault]]\nat_us = 10\ndie = 0\nkind = "glitch"\ncode = "mte-eror"\n',
    "cluster.toml": 'polcy = "cost"\n[[te]]\ncount = 99999\n[[te]]\nrole = "prefil"\n',
    "policy.toml": 'policy = "costs"\n[[te]]\n[scale]\nmost = "many"\n',
    "odd.toml": "[[te]]\n\n[[te]]\ndies = 9\napart = true\n",
    "model.toml": 'model = "deepseek-r9"\n[[te]]\n',
    "heat.json": '{"hardware": "cm384",\n "prompts": [1, "2"],\n "outputs": [1], "rates": [], "gains": []}',
    "comma.json": '{"hardware": "cm384"\n "prompts": []}\n',
    "schedule.json": '{"deployment": "pd",\n "faults": [\n  {"at_us": 1, "die": 0, "kind": "lots"}]}\n',
    "golden/manifest.json": '{"format": "1", "xdeepserve": "0", "cases": {}}\n',
    "learn/progress.json": '{"1": {"num_hints": -1}}\n',
    "text.jsonl": "hello\n",
    "trace.jsonl": '{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'
    '{"timestamp": 2, "input_length": "5", "output_length": 3, "hash_ids": [1]}\n',
    "short.jsonl": '{"timestamp": 1, "input_length": 5, "hash_ids": [1]}\n',
    "checkpoint/config.json": '{"model_type": "deepseek_v3",\n "hidden_size": 7168,,\n}\n',
    "llama/config.json": '{"model_type": "llama"}\n',
    "tools.py": "def weather(city): return city\n",
}

# What is typed, and what is said of it behind "xdeepserve COMMAND: error: ".
MISTAKES = [
    (
        "generate --promt x",
        "unknown option --promt (did you mean --prompt?)",
    ),
    (
        "generate --prompt x --max_tokens 3",
        "unknown option --max_tokens (did you mean --max-tokens?)",
    ),
    (
        "generate --prompt once upon a time",
        "nothing takes 'upon a time': a text with spaces goes in quotes",
    ),
    (
        "generate --dies 4",
        "unknown option --dies (did you mean --set dies=4?)",
    ),
    (
        "generate --prompt",
        "--prompt needs a value: --prompt=...",
    ),
    (
        "generate --prompt x --t 3",
        "--t may mean --temperature, --top-p, --top-k, --trace, --trace-dies, --timeline, --timing-only",
    ),
    (
        "generate",
        "no prompt: give --prompt TEXT or --prompt-ids 1,2,3",
    ),
    (
        "generat --prompt x",
        "unknown command 'generat' (did you mean generate?)",
    ),
    (
        "serv",
        "unknown command 'serv' (did you mean serve?)",
    ),
    (
        "bench supperpod",
        "unknown suite 'supperpod' (did you mean superpod?)",
    ),
    (
        "serve --drafts 1",
        "unknown option --drafts (did you mean --faults?)",
    ),
    (
        "generate --prompt x --precision fp16",
        "--precision must be one of int8, fp32, found 'fp16'",
    ),
    (
        "generate --prompt x --temperature -1",
        "--temperature must be 0 or more, 1e+30 at most, found -1.0",
    ),
    (
        "generate --prompt x --temperature hot",
        "--temperature must be a number, found 'hot'",
    ),
    (
        "generate --prompt x --top-p 2",
        "--top-p must lie in (0, 1], found 2.0",
    ),
    (
        "generate --prompt x --max-tokens 0",
        "--max-tokens must be an integer, 1 or more, found 0",
    ),
    (
        "generate --prompt x --max-tokens 5000",
        "--max-tokens must be 2047 at most, found 5000: the model's context holds 2048 tokens "
        "(max_model_len), and prompt 1 has 1 of them",
    ),
    (
        "generate --prompt x --mtp 7",
        "deployment monolithic: mtp must be 0, 1 or 2, found 7",
    ),
    (
        "generate --prompt x --mtp two",
        "--mtp must be a whole number, found 'two'",
    ),
    (
        "generate --prompt-ids 1,x",
        "--prompt-ids: '1,x' is not a list of token ids like 1,2,3",
    ),
    (
        "generate --prompt-ids 99999",
        "token id 99999 is out of range: the vocabulary has ids 0 to 1279",
    ),
    (
        "generate --prompt x --json=yes",
        "--json takes no value, found 'yes'",
    ),
    (
        "generate --prompt x --trace nowhere/t.json",
        "--trace nowhere/t.json: cannot be written: there is no folder nowhere",
    ),
    (
        "serve --port 99999999",
        "cannot listen on 127.0.0.1:99999999: a port is between 0 and 65535",
    ),
    (
        "serve --port http",
        "--port must be a whole number, found 'http'",
    ),
    (
        "serve --tools tools.py",
        "--tools needs --state DIR, where the jobs of agents are kept",
    ),
    (
        "serve --tools tool.py --state state",
        "--tools tool.py: No such file or directory (did you mean tools.py?)",
    ),
    (
        "serve --ssl-certfile field.toml",
        "--ssl-certfile field.toml: no certificate in PEM with a key that belongs to it",
    ),
    (
        "serve --ssl-certfile none.pem",
        "--ssl-certfile none.pem: No such file or directory",
    ),
    (
        "serve --model deepseek-r1",
        "model deepseek-r1: a configuration without weights; only timing-only runs (xdeepserve "
        "generate --timing-only, sweep, plan, bench superpod, bench engine) can use it",
    ),
    (
        "describe --deployment transfomerless",
        "unknown deployment 'transfomerless' (did you mean transformerless?): known are "
        f"{', '.join(PRESETS)}, or a .toml file",
    ),
    (
        "describe --deployment feld.toml",
        "deployment feld.toml: No such file or directory (did you mean field.toml?)",
    ),
    (
        "describe --deployment heat.json",
        f"unknown deployment 'heat.json': known are {', '.join(PRESETS)}, or a .toml file",
    ),
    (
        "describe --set scheduler.max_num_seqs",
        "deployment monolithic: 'scheduler.max_num_seqs' is not of the form key=value: "
        "scheduler.max_num_seqs=16",
    ),
    (
        "describe --set max_num_seqs",
        "deployment monolithic: 'max_num_seqs' is not of the form key=value; the nearest are "
        "prefill.max_num_seqs, decode.max_num_seqs, scheduler.max_num_seqs",
    ),
    (
        "describe --set max_num_seqs=4",
        "deployment monolithic: max_num_seqs=4: unknown setting max_num_seqs; the nearest are "
        "prefill.max_num_seqs, decode.max_num_seqs, scheduler.max_num_seqs",
    ),
    (
        'describe --set "a = 1"',
        "deployment monolithic: a = 1: unknown setting a; xdeepserve settings lists all",
    ),
    (
        "describe --deployment pd --set decode.dies=three",
        "deployment pd: decode.dies=three: decode.dies must be a whole number, found 'three'",
    ),
    (
        "describe --deployment pd --set \"decode.dies='3'\"",
        "deployment pd: decode.dies='3': decode.dies must be a whole number, found '3' (write it "
        "without quotes)",
    ),
    (
        "describe --deployment pd --set fabric=UB",
        "deployment pd: fabric=UB: fabric must be one of auto, roce, ub, vpc, found 'UB' (did you mean ub?)",
    ),
    (
        "describe --set cache.prefix=True",
        "deployment monolithic: cache.prefix=True: cache.prefix must be true or false, found 'True' "
        "(write true)",
    ),
    (
        "describe --set scheduler=3",
        "deployment monolithic: scheduler=3: scheduler must be a section, found 3",
    ),
    (
        "describe --deployment eaas --set experts.counts=4,4",
        "deployment eaas: experts.counts=4,4: experts.counts must be a list of whole numbers, found "
        "'4,4' (write [4,4])",
    ),
    (
        "describe --set decode.dies=2",
        "deployment monolithic: decode is no setting of monolithic, which is one die",
    ),
    (
        "describe --set cache.block_size=20",
        "deployment monolithic: cache.block_size must be a multiple of 16, found 20",
    ),
    (
        "describe --deployment field.toml",
        "deployment field.toml, line 4: unknown setting decode.cuont; the nearest are decode.count, "
        "prefill.count, attention.count",
    ),
    (
        "describe --deployment values.toml",
        f"deployment values.toml, line 1: kind must be one of {KINDS}, found 'pdd' (did you mean pd?); "
        "line 3: decode.count must be a whole number, found 'two'",
    ),
    (
        "describe --deployment list.toml",
        "deployment list.toml, line 5: [[te]] number 2: role must be one of both, decode, prefill, "
        "found 'decoding' (did you mean decode?); line 6: [[te]] number 2: dies must be a whole "
        "number, found '4' (write it without quotes); line 7: [[te]] number 2: unknown field harware "
        "(did you mean hardware?)",
    ),
    (
        "describe --deployment section.toml",
        "deployment section.toml, line 2: decode must be a section, found 3",
    ),
    (
        "describe --deployment unquoted.toml",
        "deployment unquoted.toml, line 1, column 8: not valid TOML: invalid value (a text stands in quotes)",
    ),
    (
        "describe --deployment kindless.toml",
        f"deployment kindless.toml: kind is missing: one of {KINDS}",
    ),
    (
        "describe --deployment json.toml",
        "deployment json.toml, line 1, column 1: not valid TOML: invalid statement; it looks like JSON",
    ),
    (
        "describe --deployment bytes.toml",
        "deployment bytes.toml: not a text in UTF-8 (byte 7)",
    ),
    (
        "settings cash.load",
        "unknown setting cash.load; the nearest are cache.load, scale.low, scale.least",
    ),
    (
        "settings frobnicate",
        "unknown setting frobnicate; xdeepserve settings lists all",
    ),
    (
        "generate --help cach.load",
        "--help: unknown setting cach.load; the nearest are cache.load, scale.low, scale.least",
    ),
    (
        "describe --model deepsek-r1",
        "model 'deepsek-r1': neither a preset (tiny, tiny-random, tiny-r1; for what only takes time "
        "deepseek-r1, deepseek-v3, mixtral-8x22b, dbrx, scaled-moe) nor a directory "
        "that is there (did you mean deepseek-r1?)",
    ),
    (
        "describe --model gpt-5",
        "model 'gpt-5': neither a preset (tiny, tiny-random, tiny-r1; for what only takes time "
        "deepseek-r1, deepseek-v3, mixtral-8x22b, dbrx, scaled-moe) nor a directory "
        "that is there; nothing is downloaded",
    ),
    (
        "describe --model checkpoint",
        "checkpoint/config.json, line 2, column 22: not valid JSON: expecting property name enclosed "
        "in double quotes",
    ),
    (
        "describe --model llama",
        'llama/config.json: model_type "llama" is not supported (supported: deepseek_v3, kimi_k2, '
        "deepseek_v32, glm_moe_dsa, glm4_moe_lite, qwen3_moe, glm4_moe, minimax_m2, deepseek_v2, "
        "deepseek_v4)",
    ),
    (
        "describe --model golden",
        "golden: no config.json in this directory",
    ),
    (
        "describe --model field.toml",
        "field.toml: not a directory; a checkpoint is a directory with config.json",
    ),
    (
        "generate --prompt x --faults faults.toml",
        f"faults faults.toml, line 4: [[fault]] number 1: kind must be one of {FAULTS}, found 'lst' (did you "
        "mean lost?)",
    ),
    (
        "generate --prompt x --faults when.toml",
        "faults when.toml, line 2: [[fault]] number 1: at_us must be a number, found 'soon'; line 3: "
        "[[fault]] number 1: unknown field dei (did you mean die?)",
    ),
    (
        "generate --prompt x --faults one-fault.toml",
        "faults one-fault.toml, line 1: fault must be a list of sections: [[fault]], not [fault]",
    ),
    (
        "generate --prompt x --faults place.toml",
        "fault 'die 99 lost at 10 us': the deployment has no die 99; it has 1: 0",
    ),
    (
        "generate --prompt x --faults code.toml",
        "fault 'die 0 glitch mte-eror at 10 us': unknown code (did you mean mte-error?): known are "
        "aicore-exception, vector-core-exception, mte-error, dma-error, link-error, task-timeout, "
        "unspecified",
    ),
    (
        "generate --prompt x --faults fault.toml",
        "faults fault.toml: No such file or directory (did you mean faults.toml?)",
    ),
    (
        "generate --prompt x --faults golden",
        "faults golden: Is a directory",
    ),
    (
        "replay trace.jsonl",
        "trace.jsonl, line 2: input_length must be a whole number, 0 or more, found '5' (write it "
        "without quotes)",
    ),
    (
        "replay short.jsonl",
        "short.jsonl, line 1: no column with tokens of answers: must be output_length, found 'timestamp', "
        "'input_length', 'hash_ids'",
    ),
    (
        "replay text.jsonl",
        "text.jsonl, line 1: no column with arrival times: must be timestamp, time, "
        "arrival_time, arrived_at or the like, found 'hello'",
    ),
    (
        "replay tracee.jsonl",
        "tracee.jsonl: No such file or directory (did you mean trace.jsonl?)",
    ),
    (
        "replay trace.jsonl --format mooncak",
        "unknown trace format 'mooncak' (did you mean mooncake?): known are bailian, mooncake, azure, "
        "burstgpt, vidur, splitwise, jsonl, csv",
    ),
    (
        "replay made:promt=3",
        "made: 'promt=3' is no setting (did you mean prompt?): KEY=VALUE with KEY one of requests, "
        "seconds, burst, swing, prompt, output, spread, turns, pause, systems, system, habit, block, "
        "seed",
    ),
    (
        "replay made:prompt=x",
        "made: prompt must be a whole number, found 'x'",
    ),
    (
        "replay made:prompt=0",
        "made: prompt must lie in [1, 1e+06], found 0",
    ),
    (
        "replay made: --set dies=4",
        "--set: only with --deployment D, which serves tokens; time only, sizes of TEs stand in a "
        "file: --cluster FILE",
    ),
    (
        "replay made: --cluster cluster.toml",
        "cluster cluster.toml, line 1: unknown field polcy (did you mean policy?); line 3: [[te]] "
        "number 1: count must be a whole number from 1 to 4,096, found 99999; line 5: [[te]] number "
        "2: role must be one of both, decode, prefill, found 'prefil' (did you mean prefill?)",
    ),
    (
        "replay made: --cluster policy.toml",
        "cluster policy.toml, line 1: policy must be one of cost, deepserve, dynamo, llm-d, load, "
        "pd-aware, prefix, round-robin, sequences or module:function, found 'costs' (did you mean cost?); "
        "line 4: scale.most must be a whole number, found 'many'",
    ),
    (
        "replay made: --cluster odd.toml",
        "cluster odd.toml, line 4: [[te]] number 2: dies must be an even number, as apart=true has "
        "two halves, found 9",
    ),
    (
        "replay made: --cluster model.toml",
        "model 'deepseek-r9': neither a preset (tiny, tiny-random, tiny-r1; for what only takes time "
        "deepseek-r1, deepseek-v3, mixtral-8x22b, dbrx, scaled-moe) nor a directory "
        "that is there (did you mean deepseek-r1?)",
    ),
    (
        "replay made: --cluster heat.json",
        "cluster heat.json, line 1, column 1: not valid TOML: invalid statement; it looks like JSON",
    ),
    (
        "replay made: --policy costs",
        "unknown policy 'costs' (did you mean cost?): known are sequences, round-robin, load, prefix,"
        " cost, deepserve, pd-aware, dynamo, llm-d",
    ),
    (
        "replay made: --policy deepserve --heat heat.json",
        "heat map heat.json, line 2: prompts[1] must be a whole number, found '2' (write it without quotes)",
    ),
    (
        "replay made: --policy deepserve --heat comma.json",
        "heat map comma.json, line 2, column 2: not valid JSON: expecting ',' delimiter",
    ),
    (
        "replay made: --policy deepserve --heat field.toml",
        "heat map field.toml, line 1, column 1: not valid JSON: expecting value; it looks like TOML",
    ),
    (
        "chaos --replay schedule.json",
        f"schedule schedule.json, line 3: faults[0].kind must be one of {FAULTS}, found 'lots' (did you "
        "mean lost?)",
    ),
    (
        "chaos --part 3",
        "--part: '3' is not K/N with K from 1 to N",
    ),
    (
        "chaos --deployment pdd",
        "no chaos for deployment 'pdd' (did you mean pd?): known are monolithic, colocated, pd, "
        "moe-attention, transformerless, eaas",
    ),
    (
        "golden check golden",
        "manifest golden/manifest.json, line 1: format must be a whole number, found '1' (write it "
        "without quotes)",
    ),
    (
        "golden chek golden",
        "action must be one of write, check, found 'chek' (did you mean check?)",
    ),
    (
        "learn list --dir learn",
        "learn/progress.json, line 1: 1.num_hints must be a whole number, 0 or more, found -1",
    ),
    (
        "sweep --set dise=2",
        "unknown setting dise; the nearest are dies, prefill.dies, decode.dies",
    ),
    (
        "sweep --batch 1,x",
        "--batch: '1,x' is not a list of numbers like 32,64",
    ),
    (
        "cluster --state state -- --promt",
        "unknown option --promt (did you mean --port?)",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    for name, content in FILES.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def answered(*typed: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(typed)
        except SystemExit as done:
            code = int(done.code or 0)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(("typed", "said"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_answered_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = answered(*shlex.split(typed))
    assert (code, out) == (2, "")
    assert re.fullmatch(
        rf"xdeepserve[ a-z-]*: error: {re.escape(said)}( \(see xdeepserve[ a-z-]* --help\))?\n", err
    ), err


# What libraries would say, and a user should never read.
LIBRARIES = (
    "Expected `", "at `$", "msgspec", "Object ", "Invalid enum", "NoneType", "Traceback", "dtype", "tomllib",
    "JSONDecode", "argument", "Errno", "invalid choice", "unrecognized", "_ssl", "numpy", "Error:", "<class",
    "char 0", "deserializ",
)  # fmt: skip


@pytest.mark.parametrize("word", LIBRARIES)
def test_no_answer_speaks_of_a_library(word: str) -> None:
    assert [typed for typed, said in MISTAKES if word in said] == []


def test_there_are_mistakes_of_every_kind() -> None:
    assert len(MISTAKES) >= 40
    assert {typed.split()[0] for typed, _ in MISTAKES} >= {
        "generate", "serve", "describe", "replay", "chaos", "golden", "learn", "sweep", "settings", "cluster",
    }  # fmt: skip
    for file in FILES:  # no file is there for nothing
        assert any(Path(file).stem in typed or file.split("/")[0] in typed for typed, _ in MISTAKES), file


# ---- help -------------------------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its commands and suites."""
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                yield from parsers(each)


def test_each_help_is_a_screen_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    helps = {each.prog: each.format_help() for each in parsers(build_parser())}
    assert len(helps) == 1 + len(COMMANDS) + len(SUITES)
    counts = {name: text.count("\n") for name, text in helps.items()}
    assert max(counts.values()) <= SCREEN, counts
    assert [name for name, text in helps.items() if "cache.preemption" in text] == []


TAKE_SETTINGS = ("generate", "serve", "describe", "sweep", "replay", "place", "expert-server")


@pytest.mark.parametrize("command", TAKE_SETTINGS)
def test_settings_are_a_help_of_their_own(command: str) -> None:
    _, out, _ = answered(command, "--help")
    assert out.count(f"settings: xdeepserve {command} --help settings, or xdeepserve settings [KEY]\n") == 1
    if "model and deployment:" in out:  # behind the command's own options
        assert out.index("\noptions:") < out.index("\nmodel and deployment:")
    _, everything, _ = answered("settings")
    assert answered(command, "--help", "settings") == (0, everything, "")
    assert answered(command, "-h", "cache.load") == answered("settings", "cache.load")


def test_every_command_with_settings_is_in_the_list() -> None:
    (commands,) = (each for each in build_parser()._actions if isinstance(each.choices, dict))
    has_set = {name for name, each in commands.choices.items() if "--set" in each._option_string_actions}
    assert has_set == set(TAKE_SETTINGS)


@pytest.mark.parametrize("words", [["serve", "--help"], ["generate", "--help", "settings"]])
def test_help_comes_at_once(words: list[str]) -> None:
    code = (
        "import contextlib, sys\nfrom xdeepserve.cli import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({words})\n"
        "assert not {'numba', 'numpy', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("deepseek-v3", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("DeepSeek-R1", "deepseek-r1"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("databricks/dbrx-base", "dbrx"),
        ("Tiny", "tiny"),
        ("deepseek-ai/deepseek-v2", None),
        ("somebody/DeepSeek-V3", None),
    ],
)
def test_models_by_the_names_of_hugging_face(name: str, preset: str | None) -> None:
    assert preset_name(name) == preset
    if preset not in (None, "tiny"):
        model = resolve_model(name)
        assert isinstance(model, ConfigOnly)
        assert model.name == preset


def test_a_directory_comes_before_what_else_its_name_may_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ALIASES:
        assert preset_name(name) is not None
        (tmp_path / name).mkdir()
        assert preset_name(name) is None


# ---- files ------------------------------------------------------------------------------------------

KINDS = (
    Deployment, Cluster, Fault, FaultSchedule, HeatMap, Manifest, TrainingLine, MadeTraffic,
    dict[str, Any],
)  # fmt: skip
CHECKED = {  # what `mistakes` looks into; other types would be passed over
    "StructType", "DictType", "TupleType", "VarTupleType", "ListType", "UnionType", "LiteralType", "StrType",
    "BoolType", "IntType", "FloatType", "NoneType", "AnyType", "Metadata",
}  # fmt: skip


def types_in(kind: Any) -> Iterator[str]:
    """The names of all types within a type, as msgspec describes it."""
    yield type(kind).__name__
    inner = [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
    inner += [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
    inner += [each.type for each in getattr(kind, "fields", ())]
    if isinstance(kind, msgspec.inspect.Metadata):
        assert isinstance(kind.type, msgspec.inspect.StrType)
        assert kind.extra is not None
        assert kind.type.pattern, "a name out of a table is looked into by its pattern"
        assert kind.extra["names"]
    for each in filter(None, inner):
        yield from types_in(each)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_that_a_file_may_have_is_looked_into(kind: Any) -> None:
    assert set(types_in(msgspec.inspect.type_info(kind))) <= CHECKED


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A section."""

    number: int = 0
    pair: tuple[int, float] | None = None


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """A file."""

    inner: Inner = msgspec.field(default_factory=Inner)
    rows: tuple[Inner, ...] = ()
    either: int | str | None = None
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.either == 13:
            raise ValueError("13 brings bad luck")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('texts = [\n  "a",\n  3,\n]\n', "line 1: texts[1] must be a text in quotes, found 3"),
        ("\n\ninner.number = 1.5", "line 3: inner.number must be a whole number, found 1.5"),
        ("[inner]\nnumber = 2024-05-01", "line 2: inner.number must be a whole number, found 2024-05-01"),
        ('["inner"]\n"number" = true', "line 2: inner.number must be a whole number, found true"),
        ("inner = {number = 'x'}", "line 1: inner.number must be a whole number, found 'x'"),
        (
            "[[rows]]\nnumber = 1\n[[rows]]\n# nothing\n[[rows]] # here\n  nomber = 2",
            "line 6: [[rows]] number 3: unknown field nomber (did you mean number?)",
        ),
        ("[[rows]]\npair = [1]", "line 2: [[rows]] number 1: pair must be a list of 2, found [1]"),
        ("[[rows]]\npair = [1, 'x']", "line 2: [[rows]] number 1: pair[1] must be a number, found 'x'"),
        ("[rows]\nnumber = 1", "line 1: rows must be a list of sections: [[rows]], not [rows]"),
        ("either = 1.5", "line 1: either must be a whole number or a text in quotes, found 1.5"),
        ("either = 13", ": 13 brings bad luck"),
        ("texts = 'a'", "line 1: texts must be a list of texts in quotes, found 'a'"),
        ("number = 1\nnumber = 2\n", "line 2, column 11: not valid TOML: a key is given twice"),
        ("[inner\n", "line 1, column 7: not valid TOML: expected ']' at the end of a table declaration"),
    ],
)
def test_lines_and_places_in_toml(text: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        Document(text, "file", "TOML").to(Outer)
    assert str(refusal.value).removeprefix("file, ").removeprefix("file").startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rows": [{},\n {"number": "{,\\"["},\n {"numbr": 1}]}', "line 2: rows[1].number must be a whole"),
        ('{"texts": ["a", "b",\n "c",\n null]}', "line 3: texts[3] must be a text in quotes, found null"),
        ('{"inner": {"number": 1},\n "either": [1]}', "line 2: either must be a whole number or a text"),
        (
            '{"inner":\n {"number": 1,\n "nomber": 2}}',
            "line 3: unknown field inner.nomber (did you mean number?)",
        ),
        ('{"inner": {},,}', "line 1, column 14: not valid JSON: expecting property name"),
        ('{"either": NaN}', ": not valid JSON: NaN is no number"),
        ("[" * 100_000, ": not valid JSON: it is nested too deeply"),
        (f'{{"either": {"1" * 5000}}}', ": not valid JSON: too many digits"),
        ("[]", ": must be an object, found []"),
        ("either = 3", "line 1, column 1: not valid JSON: expecting value; it looks like TOML"),
    ],
)
def test_lines_and_places_in_json(text: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        Document(text, "file", "JSON").to(Outer)
    assert str(refusal.value).removeprefix("file, ").removeprefix("file").startswith(said)


def test_a_line_of_json_has_the_number_that_it_has_in_its_file() -> None:
    assert read_line(b'{"either": 1}', Outer, "file", 7).either == 1
    for line, said in (
        (b'{"either": 1.5}\n', "file, line 7: either must be"),
        (b"{}{\n", "file, line 7, column 3: not valid JSON: extra data"),
        (b"[]", "file, line 7: must be an object, found []"),
        (b"\xff", "file, line 7: not a text in UTF-8 (byte 0)"),
        (json.dumps({"texts": [1]}).encode(), "file, line 7: texts[0] must be"),
    ):
        with pytest.raises(InputError) as refusal:
            read_line(line, Outer, "file", 7)
        assert str(refusal.value).startswith(said)


def test_a_byte_order_mark_is_no_mistake(folder: Path) -> None:
    (folder / "mark.toml").write_bytes(b'\xef\xbb\xbfkind = "pd"\n')
    assert answered("describe", "--deployment", str(folder / "mark.toml"))[0] == 0
