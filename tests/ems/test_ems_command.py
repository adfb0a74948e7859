"""`xdeepserve ems`: what a directory holds, whether it is sound, empty again; refusals are one line."""

import json
import os
from pathlib import Path

import pytest

from tests.ems.tools import make, put, run
from xdeepserve.cli import main
from xdeepserve.errors import InputError


def filled(path: Path) -> None:
    pool = make(path)
    run(pool, put(pool, pool.client(), [*range(12)]))
    run(pool, put(pool, pool.client(), [*range(3)], "b"))
    pool.close()


def told(capsys: pytest.CaptureFixture[str], action: str, path: Path, code: int = 0) -> dict[str, object]:
    assert main(["ems", action, str(path), "--json"]) == code
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_inspect_verify_and_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    for action in ("inspect", "verify"):
        report = told(capsys, action, tmp_path)
        assert report["sound"] is True
        volumes = report["volumes"]
        assert isinstance(volumes, list)
        parts = [part for volume in volumes for part in volume["namespaces"]]
        assert sum(part["values"] for part in parts) == 15
        assert sum(part["bytes"] for part in parts if part["namespace"] == "b") == 3 * 40_000
    assert main(["ems", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "server-00: a has " in out
    assert out.endswith("3 volumes, 15 values of 600,000 bytes\n")
    path = tmp_path / "server-01.sqlite"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1  # in the last page of a value
    path.write_bytes(data)
    assert told(capsys, "verify", tmp_path, code=1)["sound"] is False
    assert told(capsys, "verify", tmp_path)["sound"] is True
    assert main(["ems", "clear", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": deleted\n")
    assert not [*tmp_path.glob("*.sqlite*")]
    make(tmp_path).close()


def test_a_structure_that_no_value_shows_to_be_damaged_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path).close()
    path = tmp_path / "server-01.sqlite"
    data = bytearray(path.read_bytes())
    for at in range(5, 11):  # the head of a table that is empty
        data[16384 + at] ^= 0xA5
    path.write_bytes(data)
    assert told(capsys, "verify", tmp_path, code=1)["sound"] is False
    assert told(capsys, "verify", tmp_path)["sound"] is True


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(action: str, path: Path) -> str:
        assert main(["ems", action, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return str(line)

    assert refused("inspect", tmp_path / "x").endswith(
        f"x: no such directory; an LLM with ems.path={tmp_path / 'x'} makes it"
    )
    assert not (tmp_path / "x").exists()
    assert refused("clear", tmp_path).endswith("there is no memory pool in this directory")
    pool = make(tmp_path)
    assert "this memory pool is in use by another LLM of this process" in refused("verify", tmp_path)
    pool.close()
    (tmp_path / "server-02.sqlite").write_bytes(b"a diary " * 200)
    assert "not a volume of a memory pool; somebody else's file is left alone" in refused("clear", tmp_path)
    assert (tmp_path / "server-02.sqlite").read_bytes().startswith(b"a diary")


def test_what_cannot_be_used_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> str:
        there = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError) as caught:
            make(path)
        for action in ("inspect", "verify", "clear"):
            assert main(["ems", action, str(path)]) == 2
            assert capsys.readouterr().err == f"xdeepserve ems: error: {caught.value}\n"
        assert sorted(tmp_path.rglob("*")) == there
        return str(caught.value)

    assert refused(tmp_path / ("x" * 300)).endswith("x: File name too long")
    volume = tmp_path / "server-02.sqlite"
    volume.write_bytes(b"a diary " * 200)
    assert refused(tmp_path).endswith("somebody else's file is left alone")
    volume.unlink()
    os.mkfifo(volume)
    assert refused(tmp_path).endswith("server-02.sqlite: not a file, so no volume of a memory pool")
    volume.unlink()
    make(tmp_path).close()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and Path(path) != volume)
    assert refused(tmp_path).endswith("server-02.sqlite: no permission to write it")
    monkeypatch.undo()

    def hidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", hidden)
    assert refused(tmp_path).endswith(": Permission denied")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_can_be_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who uses it cannot be written down then."""
    filled(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to("/dev/full")
    assert told(capsys, "verify", tmp_path)["sound"] is True
