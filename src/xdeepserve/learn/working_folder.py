"""The learner's working folder: stories, skeletons, and `progress.json`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from xdeepserve.errors import InputError
from xdeepserve.learn.exercise import Exercise
from xdeepserve.reading import read


class Standing(msgspec.Struct):
    """Progress of a learner in one exercise."""

    num_hints: Annotated[int, msgspec.Meta(ge=0)] = 0  # that have been given
    passed: str = ""  # digest of the file that has passed


class WorkingFolder:
    """A folder with skeletons and stories. InputError if its progress cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self._progress = path, path / "progress.json"
        if path.exists() and not path.is_dir():
            raise InputError(f"--dir {path}: not a directory")
        self.standings: dict[str, Standing] = {}
        if self._progress.exists():
            self.standings = read(self._progress, "JSON").to(dict[str, Standing])

    def source(self, exercise: Exercise) -> Path:
        """Absolute path of the learner's file."""
        return (self.path / f"{exercise.stem}.py").resolve()

    def start(self, exercise: Exercise) -> list[Path]:
        """Write skeleton and story. InputError, with nothing written, if the learner has changed either."""
        made = {
            self.path / f"{exercise.stem}.md": exercise.story,
            self.path / f"{exercise.stem}.py": exercise.skeleton,
        }
        for path, text in made.items():
            if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
                raise InputError(f"{path} has been changed, and stays as it is: remove it to start again")
        self.path.mkdir(parents=True, exist_ok=True)
        for path, text in made.items():
            path.write_bytes(text.encode())
        return [*made]

    def state(self, exercise: Exercise) -> str:
        """Progress in an exercise: `solved` if the file is the one that has passed, else `changed since`,
        `started` or empty."""
        source, standing = self.source(exercise), self.standings.get(exercise.slug, Standing())
        if not source.is_file():
            return ""
        if not standing.passed:
            return "started"
        return "solved" if digest_of(source) == standing.passed else "changed since"

    def passed(self, exercise: Exercise, digest: str) -> None:
        """Note the digest of a file that has passed."""
        self._standing(exercise).passed = digest
        self._keep()

    def next_hint(self, exercise: Exercise) -> tuple[int, str, bool]:
        """Give the next hint: number, text, and whether it is new.

        When there are no more, the last one comes again.
        """
        standing, num_hints = self._standing(exercise), len(exercise.hints)
        is_new = standing.num_hints < num_hints
        standing.num_hints = min(standing.num_hints + 1, num_hints)
        self._keep()
        return standing.num_hints, exercise.hints[standing.num_hints - 1], is_new

    def _standing(self, exercise: Exercise) -> Standing:
        return self.standings.setdefault(exercise.slug, Standing())

    def _keep(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._progress.write_bytes(msgspec.json.format(msgspec.json.encode(self.standings)) + b"\n")


def digest_of(path: Path) -> str:
    """Digest of a file's bytes, by which a change is noticed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
