"""SHA-256 of the files of a model, as a statement that the package model-signing signs and verifies.

Source: OpenSSF model-signing 1.1, `_signing/signing.py` `Payload` and `_serialization/file.py`: an in-toto statement v1
with the predicate type below; ``resources`` are all files below the folder, in the order of their paths as text; the
subject's digest is the SHA-256 of their digests, joined as bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..errors import FormatError, MissingFileError
from ..io.storage.urls import is_url
from ..jobs.batching import Task
from ..jobs.executor import runner
from ..jobs.progress import Bar

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
IGNORED = (".git", ".gitattributes", ".github", ".gitignore")  # model-signing leaves these out
_PIECE = 1 << 20


def statement(path: str, memory: int | str | None = None, progress: bool | None = None) -> str:
    """Return the statement about a local file or about all files below a folder, as JSON.

    Raises MissingFileError; and FormatError for a URL, or a folder with links or other things that are no files.
    """
    if is_url(path):
        raise FormatError(f"{path}: model-signing hashes local files: give a local path, or leave out --files")
    top = Path(path)
    if not top.exists():
        raise MissingFileError(f"{path} does not exist")
    files = dict(_files(top)) if top.is_dir() else {".": top}
    digests: dict[str, str] = {}
    sizes = {name: file.stat().st_size for name, file in files.items()}
    with Bar(sum(sizes.values()), "digest", progress) as bar:

        def done(task: Task, found: tuple[str, str]) -> None:
            digests[found[0]] = found[1]
            bar.add(task.nbytes)

        tasks = (Task(sizes[name], _PIECE, partial(_sha256, name, file)) for name, file in files.items())
        runner(None, memory)(tasks, done)
    resources = [{"name": name, "algorithm": "sha256", "digest": digests[name]} for name in sorted(digests)]
    joined = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
    about = {
        "_type": STATEMENT,
        "subject": [{"name": top.resolve().name, "digest": {"sha256": joined}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(IGNORED),
            },
            "resources": resources,
        },
    }  # fmt: skip
    return json.dumps(about, indent=1)


def _files(top: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path relative to the folder, with slashes, and the file."""
    for folder, folders, names in os.walk(top, onerror=_raise):
        here = Path(folder)
        if here == top:
            folders[:] = [name for name in folders if name not in IGNORED]
            names = [name for name in names if name not in IGNORED]
        for name in (*names, *(one for one in folders if (here / one).is_symlink())):
            file = here / name
            relative = file.relative_to(top).as_posix()
            if file.is_symlink() or not file.is_file():
                raise FormatError(
                    f"{file} is {'a link' if file.is_symlink() else 'not a file'}: a signature of the folder would not "
                    "cover what it leads to. Copy the folder with files in place of links (cp -rL)"
                )
            yield relative, file


def _raise(error: OSError) -> None:
    raise error


def _sha256(name: str, file: Path) -> tuple[str, str]:
    found = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        memory = memoryview(bytearray(_PIECE))
        while size := opened.readinto(memory):
            found.update(memory[:size])
    return name, found.hexdigest()
