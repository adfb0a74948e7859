"""A volume keeps what was written, or nothing: through restarts, damage, full disks, strange files."""

import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from xdeepserve.errors import InputError
from xdeepserve.hw.volume import Key, Volume


def key(number: int, namespace: str = "a") -> Key:
    return Key(namespace, number.to_bytes(16, "big"))


def value(number: int, nbytes: int = 5000) -> bytes:
    return random.Random(number).randbytes(nbytes)


def filled(path: Path, count: int = 12) -> Volume:
    volume = Volume(path)
    volume.open()
    for first in range(0, count, 3):
        assert volume.put({key(n): value(n) for n in range(first, first + 3)})
    return volume


def reopened(path: Path) -> Volume:
    volume = Volume(path)
    volume.open()
    return volume


def test_values_outlive_the_process_and_ages_go_on(tmp_path: Path) -> None:
    volume = filled(tmp_path / "v.sqlite")
    volume.touch(key(0))
    volume.delete([key(4)])
    volume.close()
    again = reopened(tmp_path / "v.sqlite")
    assert [each.digest[-1] for each in again.rows] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 0]
    assert again.get(key(0)) == value(0)
    assert again.get(key(4)) is None
    assert again.get(key(1, "b")) is None
    assert again.nbytes["a"] == 11 * 5000
    again.put({key(20): b"young"})
    assert again.rows[key(20)].age > again.rows[key(0)].age
    again.close()
    assert not [*tmp_path.glob("*-wal")]


def test_a_value_under_another_key_is_no_value(tmp_path: Path) -> None:
    filled(tmp_path / "v.sqlite").close()
    with sqlite3.connect(tmp_path / "v.sqlite") as db:
        db.execute("UPDATE content SET value = (SELECT value FROM content WHERE id = 2) WHERE id = 1")
    db.close()
    volume = reopened(tmp_path / "v.sqlite")
    assert volume.get(key(0)) is None
    assert volume.num_mismatches == 1
    assert key(0) not in volume.rows
    assert volume.get(key(1)) == value(1)
    volume.close()


def read_all(path: Path, count: int = 12) -> int:
    """Every value is what was written or is not there; the volume takes new ones. How many are there."""
    volume = reopened(path)
    found = {n: volume.get(key(n)) for n in range(count)}
    assert all(each in (None, value(n)) for n, each in found.items())
    assert volume.put({key(99): value(99)})
    assert volume.get(key(99)) == value(99)
    volume.close()
    again = reopened(path)
    assert again.get(key(99)) == value(99)
    again.close()
    return sum(each is not None for each in found.values())


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_byte_loses_values_and_never_gives_wrong_ones(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "v.sqlite", random.Random(seed)
    filled(path).close()
    data = bytearray(path.read_bytes())
    # The header, the pages that hold the structure, and anywhere.
    at = rng.randrange((100, 3 * 16384, len(data))[seed % 3])
    data[at] ^= rng.randrange(1, 256)
    path.write_bytes(data)
    assert read_all(path) >= 0


@pytest.mark.parametrize("seed", range(10))
def test_a_torn_file_opens_again(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "v.sqlite", random.Random(seed)
    filled(path).close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate((0, 7, 99, 100)[seed] if seed < 4 else rng.randrange(size))
    read_all(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_leaves_whole_values_or_none(tmp_path: Path, seed: int) -> None:
    """The files as they are at some moment between commits, with the log, some of it damaged or cut."""
    path, copy, rng = tmp_path / "v.sqlite", tmp_path / "copy.sqlite", random.Random(seed)
    volume = filled(path)
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    volume.close()
    wal = Path(f"{copy}-wal")
    data = bytearray(wal.read_bytes())
    if seed % 2:
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    else:
        del data[rng.randrange(len(data)) :]
    wal.write_bytes(data)
    read_all(copy)


def test_other_peoples_files_and_other_formats_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "v.sqlite"
    path.write_bytes(b"a letter to a friend " * 100)
    with pytest.raises(InputError, match=r"v\.sqlite: not a volume of a memory pool; somebody else's"):
        reopened(path)
    assert path.read_bytes().startswith(b"a letter")
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE songs (name)")
    db.close()
    with pytest.raises(InputError, match="somebody else's"):
        reopened(path)
    path.unlink()
    filled(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    with pytest.raises(InputError, match=r"v\.sqlite: a volume of another format \(0x2\)"):
        reopened(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"v\.sqlite: Is a directory"):
        reopened(path)


@pytest.mark.parametrize("at", [3, 60, 63, 68, 71])
def test_damage_to_who_a_file_belongs_to_is_mended(tmp_path: Path, at: int) -> None:
    path = tmp_path / "v.sqlite"
    filled(path).close()
    for _ in range(3):  # a byte each time, another one each time: never too many at once
        data = bytearray(path.read_bytes())
        data[at] ^= 0x55
        path.write_bytes(data)
        read_all(path)
        at = at + 1 if at % 4 != 3 else at - 3


def test_a_volume_has_one_user(tmp_path: Path) -> None:
    volume = filled(tmp_path / "v.sqlite")
    with pytest.raises(InputError, match="cannot be used as a volume: database is locked"):
        reopened(tmp_path / "v.sqlite")
    assert volume.get(key(0)) == value(0)
    volume.close()


FULL = """
import resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_volume import filled, key, value
volume = filled(Path({path!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
stored = sum(volume.put({{key(n): value(n)}}) for n in range(100, 140))
assert stored < 40 and volume.num_failed == 40 - stored, (stored, volume.num_failed)
assert volume.get(key(3)) == value(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert volume.put({{key(200): value(200)}})
volume.close()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit of file sizes here")
def test_a_full_disk_refuses_values_and_keeps_what_is_there(tmp_path: Path) -> None:
    code = FULL.format(tests=str(Path(__file__).parent), path=str(tmp_path / "v.sqlite"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert read_all(tmp_path / "v.sqlite") == 12


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_volume import filled, key, value
volume = filled(Path({path!r}))
print("ready", flush=True)
number = 1000
while True:
    volume.put({{key(number): value(number, 30_000)}})
    volume.delete([key(number - 5)])
    number += 1
"""


def test_a_process_that_is_killed_leaves_a_volume_that_opens(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent), path=str(tmp_path / "v.sqlite"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert read_all(tmp_path / "v.sqlite") == 12
