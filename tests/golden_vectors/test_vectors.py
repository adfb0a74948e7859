"""Golden vectors: written, read back, the same under every interleaving; every difference is named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from xdeepserve.bf16 import round_bf16
from xdeepserve.cli import main
from xdeepserve.comm import oracles
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.golden import vectors
from xdeepserve.golden.cases import CASES, NUM_TOKENS, Done, expert
from xdeepserve.golden.locate import locate
from xdeepserve.model import canonical

COMMITTED = Path(__file__).parent / "digests.json"


@pytest.fixture(scope="module")
def done() -> dict[str, Done]:
    return {name: case.run(None) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden") / "vectors"
    vectors.write(directory)
    return directory


@pytest.fixture
def theirs(written: Path, tmp_path: Path, done: dict[str, Done], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's directory: a copy to be changed. Cases are not run again to compare with it."""
    for name, case in CASES.items():
        monkeypatch.setitem(CASES, name, case._replace(run=lambda _, name=name: done[name]))
    shutil.copytree(written, tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("recipe", ["int8", "fp32"])
def test_equal_scores_meet_the_end_of_the_choice(recipe: str, done: dict[str, Done]) -> None:
    """Who takes other positions of equal ones is found out, and so is who attends to all."""
    case = done[f"sparse-attention-{recipe}"]
    outputs, (top_k,) = case.recording.outputs, {case.parameters["top_k"]}
    ties = 0
    for scores, chosen in zip(outputs["rank0.scores"], outputs["rank0.chosen"], strict=True):
        seen = scores[np.isfinite(scores)]
        best = np.sort(seen)[::-1]
        ties += len(best) > top_k and best[top_k - 1] == best[top_k]
        assert chosen[chosen >= 0].tolist() == sorted(chosen[chosen >= 0].tolist())
        assert (chosen >= 0).sum() == min(top_k, len(seen))
    assert ties >= 1


def change(file: Path, name: str, offset: int, value: int) -> None:
    tensors = {key: x.copy() for key, x in load_file(file).items()}
    tensors[name].view(np.uint8).reshape(-1)[offset] = value
    save_file(tensors, file)


def only_difference(directory: Path) -> str:
    names, differences = vectors.check(directory)
    assert names == list(CASES)
    (difference,) = differences
    return str(difference)


# ---- what is recorded -------------------------------------------------------------------------------


def test_digests_are_the_committed_ones(done: dict[str, Done]) -> None:
    """They change only on purpose: others compare with them. To renew, write what this test finds."""
    found = {
        name: {path: vectors.digest(arrays) for path, arrays in vectors.files_of(case).items()}
        for name, case in done.items()
    }
    assert found == json.loads(COMMITTED.read_text())


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_byte_depends_on_the_order_in_which_dies_wake_up(
    name: str, seed: int, done: dict[str, Done]
) -> None:
    ours, theirs = vectors.files_of(done[name]), vectors.files_of(CASES[name].run(seed))
    assert list(ours) == list(theirs)
    for path in ours:
        assert vectors.digest(ours[path]) == vectors.digest(theirs[path]), path


@pytest.mark.parametrize("name", ["dispatch-combine-int8", "dispatch-combine-fp32"])
def test_outputs_are_what_the_mathematics_says(name: str, done: dict[str, Done]) -> None:
    inputs, _, outputs = done[name].recording
    for rank, num_tokens in enumerate(NUM_TOKENS[:3]):
        x, topk_idx = inputs[f"rank{rank}.x"], inputs[f"rank{rank}.topk_idx"]
        if name.endswith("int8"):
            q, scale = canonical.quantize_rows(x)
            x = q.astype(np.float32) * scale[:, None]
        expected = np.empty((num_tokens, 2, 8), np.float32)
        for token, slot in np.ndindex(num_tokens, 2):
            expected[token, slot] = expert(int(topk_idx[token, slot]), x[token])
        if name.endswith("int8"):
            expected = round_bf16(expected)
        assert np.array_equal(outputs[f"rank{rank}.combined"], expected)
        fused = done[name.replace("dispatch-combine", "fused")].recording
        assert np.array_equal(fused.inputs[f"rank{rank}.x"], inputs[f"rank{rank}.x"])
        expected = canonical.combine(
            expected, fused.inputs[f"rank{rank}.topk_weights"], fused.inputs[f"rank{rank}.shared"]
        )
        assert np.array_equal(fused.outputs[f"rank{rank}.combined"], expected)


def test_outputs_that_the_oracle_does_not_tell_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = oracles.combine

    def other(*args: Any) -> np.ndarray:
        out = real(*args)
        out.reshape(-1)[:1] += 1
        return out

    monkeypatch.setattr(oracles, "combine", other)
    for name in ("dispatch-combine-fp32", "fused-int8", "a2e", "a2e-naive"):
        with pytest.raises(XDeepServeError, match=r"output rank\d.combined is not what the NumPy"):
            CASES[name].run(None)


@pytest.mark.parametrize(("name", "num_attention"), [("a2e", 2), ("a2e-wide", 4)])
def test_a2e_outputs_are_what_the_mathematics_says(
    name: str, num_attention: int, done: dict[str, Done]
) -> None:
    inputs, steps, outputs = done[name].recording
    for rank, num_tokens in enumerate(NUM_TOKENS[:num_attention]):
        x, topk_idx, weights = (inputs[f"rank{rank}.{n}"] for n in ("x", "topk_idx", "topk_weights"))
        q, scale = canonical.quantize_rows(x)
        x = q.astype(np.float32) * scale[:, None]
        answers = np.empty((num_tokens, 2, 8), np.float32)
        for token, slot in np.ndindex(num_tokens, 2):
            answers[token, slot] = expert(int(topk_idx[token, slot]), x[token])
        expected = canonical.combine(round_bf16(answers), weights, None)
        assert np.array_equal(outputs[f"rank{rank}.combined"], expected)
    # Each step of either stage once, in the papers' order.
    seven = ["1", "2", "3", "4", "5", "6-7"]
    first, second = [f"A2E-{i}" for i in seven], [f"A2E'-{i}" for i in seven]
    back, last = [f"E2A-{i}" for i in seven], [f"E2A'-{i}" for i in seven[1:]]
    assert [step.name[3:] for step in steps] == first + second + back + last


def test_a2e_has_the_same_outputs_without_trampolines(done: dict[str, Done]) -> None:
    naive, through = done["a2e-naive"].recording, done["a2e"].recording
    assert vectors.digest(naive.inputs) == vectors.digest(through.inputs)
    for rank in range(2):
        name = f"rank{rank}.combined"
        assert np.array_equal(naive.outputs[name], through.outputs[name])


@pytest.mark.parametrize("way", ["", "-zero-copy", "-dma", "-urma"])
def test_messages_arrive_whatever_the_way(way: str, done: dict[str, Done]) -> None:
    inputs, steps, outputs = done[f"send-receive{way}"].recording
    for i in range(3):
        assert np.array_equal(outputs[f"rank1.message{i}"], inputs[f"rank0.message{i}"])
    # Without a copy, nothing passes through the receiver's ring.
    assert any(step.images["rank1.managed"].any() for step in steps) == (way != "-zero-copy")


def test_distflow_outputs_are_what_the_spans_say(done: dict[str, Done]) -> None:
    case = done["distflow"]
    inputs, steps, outputs = case.recording
    buffers = [inputs[f"rank{rank}.buffer"].copy() for rank in range(4)]

    def images() -> list[bytes]:
        return [buffer.tobytes() for buffer in buffers]

    def move(src: Any, dst: Any) -> None:
        data = np.concatenate([buffers[rank][at : at + size] for rank, at, size in src])
        for rank, at, size in dst:
            buffers[rank][at : at + size], data = data[:size], data[size:]

    found = [[step.images[f"rank{rank}.app"].tobytes() for rank in range(4)] for step in steps]
    expected = []
    for offered, wanted in zip(case.parameters["offered"], case.parameters["wanted"], strict=True):
        expected.append(images())  # an offer moves nothing
        move(offered, wanted)
        expected.append(images())
    move(*case.parameters["moved"])
    expected.append(images())
    assert found == expected
    assert [outputs[f"rank{rank}.buffer"].tobytes() for rank in range(4)] == images()


def test_sums_need_the_canonical_order(done: dict[str, Done]) -> None:
    inputs, _, outputs = done["all-reduce"].recording
    a, b, c, d = (inputs[f"rank{rank}.x"] for rank in range(4))
    assert np.array_equal(outputs["rank0.result"], (a + b) + (c + d))
    assert not np.array_equal(outputs["rank0.result"], ((a + b) + c) + d)


@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_every_byte_of_an_image_has_a_place(name: str, done: dict[str, Done], data: st.DataObject) -> None:
    regions = data.draw(st.sampled_from(done[name].regions))
    for region in regions:
        offset = data.draw(st.integers(0, region.nbytes - 1))
        words, span, dtype = locate(regions, region.area, region.offset + offset)
        assert words.startswith(f"{region.name}, ")
        assert span.start <= region.offset + offset < span.stop
        assert span.stop - span.start == dtype.itemsize


# ---- what is compared -------------------------------------------------------------------------------


def test_what_is_written_checks(written: Path) -> None:
    names, differences = vectors.check(written)
    assert (names, differences) == (list(CASES), [])
    manifest = json.loads((written / "manifest.json").read_text())
    for name, case in manifest["cases"].items():
        files = {str(p.relative_to(written / name)) for p in (written / name).rglob("*.safetensors")}
        assert files == set(case["digests"])
        for path, digest in case["digests"].items():
            assert vectors.digest(load_file(written / name / path)) == digest
        areas = {region["area"] for region in case["regions"]["rank0"]}
        # DistFlow needs no memory of its own; its raw addresses are somebody's app area.
        arithmetic: set[str] = set() if name.startswith("sparse") else {"metadata", "managed", "app"}
        assert areas == ({"app"} if name == "distflow" else arithmetic)


@pytest.mark.parametrize(
    ("file", "name", "offset", "where"),
    [
        # The metadata area starts with the dispatch fields: event ID u64, pointer u64, token count u32.
        (
            "dispatch-combine-int8/steps/04-dispatch-4",
            "rank2.metadata",
            32 + 16,
            "step 04-dispatch-4, rank 2, metadata byte 48 (xccl.dispatch.fields, peer 1, num_tokens): "
            "expected 0, found 99",
        ),
        (
            "dispatch-combine-int8/steps/04-dispatch-4",
            "rank2.metadata",
            31,
            "rank 2, metadata byte 31 (xccl.dispatch.fields, peer 0, padding): expected 0, found 99",
        ),
        (
            "fused-int8/steps/02-fused-dispatch-2",
            "rank2.metadata",
            # The second set of flags is the first in use: three flags of 32 bytes further.
            3 * 32 + 2 * 32 + 12,
            "rank 2, metadata byte 172 (fused.flags, set 1, peer 2, counts[1]): expected",
        ),
        (
            "send-receive/steps/03-send-3",
            "rank1.metadata",
            16,
            "step 03-send-3, rank 1, metadata byte 16 (p2p.tails, peer 0, core 0, pointer): expected 1, ",
        ),
        (
            "all-gather/steps/02-all-gather-2",
            "rank3.metadata",
            4 * 32 + 24,
            "rank 3, metadata byte 152 (collectives.fields, set 1, peer 0, kind): expected 2, found 99",
        ),
        ("all-to-all/outputs", "rank0.from1", 0, "outputs, rank 0, from1[0][0]: expected"),
    ],
)
def test_a_changed_byte_is_named(theirs: Path, file: str, name: str, offset: int, where: str) -> None:
    change(theirs / f"{file}.safetensors", name, offset, 99)
    found = only_difference(theirs)
    assert found.startswith(file.split("/")[0] + ": ")
    assert where in found


def test_the_first_of_several_differences_is_named(theirs: Path) -> None:
    case = theirs / "dispatch-combine-int8"
    change(case / "outputs.safetensors", "rank0.combined", 0, 99)
    change(case / "steps" / "05-dispatch-5.safetensors", "rank0.metadata", 0, 99)
    change(case / "steps" / "03-dispatch-3.safetensors", "rank1.managed", 9, 99)
    change(case / "steps" / "03-dispatch-3.safetensors", "rank1.managed", 700, 99)
    assert "step 03-dispatch-3, rank 1, managed byte 9 (" in only_difference(theirs)


def test_outputs_alone_will_do_and_inputs_must_be_the_same(theirs: Path) -> None:
    for name in CASES:
        shutil.rmtree(theirs / name / "steps", ignore_errors=name.startswith("sparse"))
    assert vectors.check(theirs) == (list(CASES), [])
    change(theirs / "fused-fp32" / "inputs.safetensors", "rank0.x", 0, 99)
    assert "fused-fp32: inputs, rank 0, x[0][0]: expected" in only_difference(theirs)


def test_tensors_that_are_missing_too_many_or_of_another_shape(theirs: Path) -> None:
    outputs = theirs / "all-gather" / "outputs.safetensors"
    tensors = load_file(outputs)
    save_file({k: x for k, x in tensors.items() if k != "rank1.result"}, outputs)
    assert only_difference(theirs) == "all-gather: outputs, rank 1, result: expected a tensor, found none"
    save_file(tensors | {"rank9.result": np.zeros(1)}, outputs)
    assert only_difference(theirs) == "all-gather: outputs, rank 9, result: expected none, found a tensor"
    save_file(tensors | {"rank0.result": tensors["rank0.result"].astype(np.float64)}, outputs)
    assert "rank 0, result: expected float32 [4, 5, 3], found float64 [4, 5, 3]" in only_difference(theirs)
    save_file(tensors, outputs)
    (theirs / "all-gather" / "steps" / "99-more.safetensors").write_bytes(b"")
    assert "all-gather: file steps/99-more.safetensors: expected no such step" in only_difference(theirs)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (
            lambda case: case["digests"].update({"outputs.safetensors": "sha256:00"}),
            "a2e: manifest, digests, outputs.safetensors: expected sha256:",
        ),
        (lambda case: case["digests"].popitem(), "outputs.safetensors: expected sha256:"),
        (
            lambda case: case["digests"].update(more="x"),
            "a2e: manifest, digests, more: expected nothing, found x",
        ),
        (
            lambda case: case["parameters"].update(top_k=99),
            "manifest, parameters, top_k: expected 2, found 99",
        ),
        (lambda case: case["parameters"].update(quantize=1), "quantize: expected True, found 1"),
        (lambda case: case["parameters"].pop("hidden"), "hidden: expected 8, found nothing"),
        (
            lambda case: case["parameters"]["sides"]["experts"]["dies"].reverse(),
            "a2e: manifest, parameters, sides, experts, dies[0]: expected 0, found 16",
        ),
        (
            lambda case: case["regions"]["rank1"][0].update(offset=32),
            "a2e: manifest, regions, rank1[0], offset: expected 0, found 32",
        ),
        (lambda case: case["regions"].clear(), "a2e: manifest, regions, rank0: expected ["),
    ],
    ids=range(9),
)
def test_a_forged_manifest_is_named(theirs: Path, forge: Any, message: str) -> None:
    path = theirs / "manifest.json"
    manifest = json.loads(path.read_text())
    forge(manifest["cases"]["a2e"])
    path.write_text(json.dumps(manifest))
    _, (difference,) = vectors.check(theirs, ["a2e", "barrier"])
    assert message in str(difference)
    # A file's own difference says more.
    change(theirs / "a2e" / "outputs.safetensors", "rank0.combined", 0, 99)
    _, (difference,) = vectors.check(theirs, ["a2e"])
    assert "a2e: outputs, rank 0, combined[0][0]" in str(difference)


def test_a_case_that_the_manifest_does_not_name_is_not_passed_over(theirs: Path) -> None:
    path = theirs / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["cases"]["a2e"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="the manifest does not name 'a2e', which is there"):
        vectors.check(theirs)
    shutil.rmtree(theirs / "a2e")
    assert vectors.check(theirs, ["barrier"]) == (["barrier"], [])


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda file: file.unlink(), "found nothing"),
        (lambda file: (file.unlink(), file.mkdir()), "found a directory"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "found no regular file"),
        (lambda file: file.write_bytes(b"not tensors"), "found something else: "),
        (lambda file: file.write_bytes(file.read_bytes()[:-4]), "found something else: "),
    ],
    ids=["missing", "directory", "pipe", "no tensors", "cut short"],
)
@pytest.mark.parametrize("path", ["inputs", "outputs"])
def test_a_file_that_cannot_be_read_is_its_cases_difference_and_hides_no_other(
    theirs: Path, path: str, spoil: Callable[[Path], object], found: str
) -> None:
    spoil(theirs / "a2e" / f"{path}.safetensors")
    change(theirs / "barrier" / "outputs.safetensors", "rank0.passed", 0, 99)
    names, differences = vectors.check(theirs)
    assert names == list(CASES)
    one, other = map(str, differences)
    assert one.startswith(f"a2e: file {path}.safetensors: expected a safetensors file, {found}")
    assert other.startswith("barrier: outputs, rank 0, passed[0]: expected")


def test_a_step_or_manifest_that_is_a_directory_is_called_one(theirs: Path) -> None:
    for path in ("a2e/steps/01-A2E-1.safetensors", "manifest.json"):
        (theirs / path).unlink()
        (theirs / path).mkdir()
        if path.endswith("json"):
            with pytest.raises(InputError, match="Is a directory"):
                vectors.check(theirs, ["a2e"])
        else:
            assert only_difference(theirs).endswith("expected a safetensors file, found a directory")


def test_files_of_the_desktop_are_no_steps(theirs: Path) -> None:
    (theirs / "a2e" / "steps" / ".DS_Store").write_bytes(b"x")
    assert vectors.check(theirs, ["a2e"]) == (["a2e"], [])


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BOOL", "U64"])
def test_a_type_that_numpy_does_not_have_is_named(theirs: Path, dtype: str) -> None:
    """The header says what a tensor is, so its bytes need not be understood."""
    file = theirs / "fused-int8" / "outputs.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    what = header["rank0.combined"]
    nbytes = what["data_offsets"][1] - what["data_offsets"][0]
    size = {"BF16": 2, "F16": 2, "U64": 8}.get(dtype, 1)
    what["dtype"], what["shape"] = dtype, [nbytes // size]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    name = {"F16": "float16", "BOOL": "bool", "U64": "uint64"}.get(dtype, dtype)
    where = "fused-int8: outputs, rank 0, combined"
    assert only_difference(theirs) == f"{where}: expected float32 [3, 8], found {name} [{nbytes // size}]"


def test_a_tensor_without_a_rank_is_named_as_it_is(theirs: Path) -> None:
    file = theirs / "barrier" / "outputs.safetensors"
    for name in ("foo", "rankX", "rank1x.passed"):
        save_file(load_file(theirs / "barrier" / "outputs.safetensors") | {name: np.zeros(1)}, file)
        assert only_difference(theirs) == f"barrier: outputs, tensor '{name}': expected none, found a tensor"
        tensors = load_file(file)
        save_file({key: x for key, x in tensors.items() if key != name}, file)


# ---- the command ------------------------------------------------------------------------------------


def test_the_command_writes_checks_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "vectors")
    assert main(["golden", "write", directory, "--case", "all-reduce", "--case", "send-receive"]) == 0
    assert capsys.readouterr().out == f"2 cases in {directory}: all-reduce, send-receive\n"
    assert main(["golden", "check", directory]) == 0
    assert capsys.readouterr().out == "all-reduce: equal\nsend-receive: equal\n"
    change(tmp_path / "vectors" / "all-reduce" / "outputs.safetensors", "rank0.result", 0, 99)
    assert main(["golden", "check", directory]) == 1
    out = capsys.readouterr().out
    assert out.startswith("send-receive: equal\nall-reduce: outputs, rank 0, result[0][0]: expected")
    assert main(["golden", "check", directory, "--case", "send-receive"]) == 0


def test_what_cannot_be_read_or_written_is_one_line(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(message: str, *arguments: str) -> None:
        assert main(["golden", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    directory = str(theirs)
    refused("exists and is not an empty directory", "write", directory)
    refused("no golden case 'nothing': there are dispatch-combine-int8,", "write", "x", "--case", "nothing")
    refused("manifest.json: No such file", "check", str(tmp_path / "none"))
    refused("no golden case 'nothing'", "check", directory, "--case", "nothing")
    manifest = theirs / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 2'))
    refused("format 2 is not supported, only 1", "check", directory)
    manifest.write_text(text.replace('"fused-int8": {', '"fused-int3": {'))
    refused("no golden case 'fused-int3'", "check", directory)
    manifest.write_text(text[:100])
    refused("manifest.json, line 6, column 19: not valid JSON", "check", directory)
    file = tmp_path / "file"
    file.write_text("")
    refused("is not an empty directory", "write", str(file))
    refused("cannot be written", "write", str(file / "below"))


def test_a_manifest_without_cases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1, "xdeepserve": "0", "cases": {}}')
    with pytest.raises(InputError, match="there are no cases"):
        vectors.check(tmp_path)
