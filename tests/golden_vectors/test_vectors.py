"""Golden vectors: written, read back, the same under every interleaving; every difference is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.golden import vectors
from xdeepserve.golden.cases import CASES, NUM_TOKENS, Done, expert
from xdeepserve.golden.cells import locate
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
def theirs(written: Path, tmp_path: Path) -> Path:
    """Somebody else's directory: a copy to be changed."""
    shutil.copytree(written, tmp_path / "theirs")
    return tmp_path / "theirs"


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
            expected = canonical.round_bf16(expected)
        assert np.array_equal(outputs[f"rank{rank}.combined"], expected)
        fused = done[name.replace("dispatch-combine", "fused")].recording
        assert np.array_equal(fused.inputs[f"rank{rank}.x"], inputs[f"rank{rank}.x"])
        expected = canonical.combine(
            expected, fused.inputs[f"rank{rank}.topk_weights"], fused.inputs[f"rank{rank}.shared"]
        )
        assert np.array_equal(fused.outputs[f"rank{rank}.combined"], expected)


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
        expected = canonical.combine(canonical.round_bf16(answers), weights, None)
        assert np.array_equal(outputs[f"rank{rank}.combined"], expected)
    # Each step of either stage once, in the papers' order.
    seven = ["1", "2", "3", "4", "5", "6-7"]
    first, second = [f"A2E-{i}" for i in seven], [f"A2E'-{i}" for i in seven]
    back, last = [f"E2A-{i}" for i in seven], [f"E2A'-{i}" for i in seven[1:]]
    assert [step.name[3:] for step in steps] == first + second + back + last


def test_sums_need_the_canonical_order(done: dict[str, Done]) -> None:
    inputs, _, outputs = done["all-reduce"].recording
    a, b, c, d = (inputs[f"rank{rank}.x"] for rank in range(4))
    assert np.array_equal(outputs["rank0.result"], (a + b) + (c + d))
    assert not np.array_equal(outputs["rank0.result"], ((a + b) + c) + d)


@given(st.sampled_from(sorted(CASES)), st.data())
def test_every_byte_of_an_image_has_a_place(name: str, data: st.DataObject) -> None:
    regions = CASES_RUN.setdefault(name, CASES[name].run(None)).regions
    for rank in range(len(regions)):
        for region in regions[rank]:
            offset = data.draw(st.integers(0, region.nbytes - 1))
            words, span, dtype = locate(regions[rank], region.area, region.offset + offset)
            assert words.startswith(f"{region.name}, ")
            assert span.start <= region.offset + offset < span.stop
            assert span.stop - span.start == dtype.itemsize


CASES_RUN: dict[str, Done] = {}


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
        assert {region["area"] for region in case["regions"]["rank0"]} == {"metadata", "managed", "app"}


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
        shutil.rmtree(theirs / name / "steps")
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
    (theirs / "fused-int8" / "outputs.safetensors").write_bytes(b"not tensors")
    refused("outputs.safetensors: not a safetensors file", "check", directory)
    (theirs / "fused-int8" / "outputs.safetensors").unlink()
    refused("outputs.safetensors: no such file", "check", directory)
    manifest = theirs / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 2'))
    refused("format 2 is not supported, only 1", "check", directory)
    manifest.write_text(text.replace('"fused-int8": {', '"fused-int3": {'))
    refused("no golden case 'fused-int3'", "check", directory)
    manifest.write_text(text[:100])
    refused("not a manifest of golden vectors", "check", directory)
    file = tmp_path / "file"
    file.write_text("")
    refused("is not an empty directory", "write", str(file))
    refused("cannot be written", "write", str(file / "below"))


def test_a_manifest_without_cases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1, "xdeepserve": "0", "cases": {}}')
    with pytest.raises(InputError, match="there are no cases"):
        vectors.check(tmp_path)
