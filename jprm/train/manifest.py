"""What makes a directory of files a complete checkpoint: a list of their SHA-256 sums, written last.

Orbax makes a save atomic, but it keeps no checksum of array data: a flipped bit on disk restores silently as a wrong weight.
`MANIFEST.json` closes that hole. Nothing here knows arrays; a manifest can be checked on a machine without accelerators.
"""

import hashlib
import json
import os
from collections.abc import Iterable

from etils import epath

MANIFEST = "MANIFEST.json"
_FORMAT = 1


def is_object_store(path: epath.PathLike) -> bool:
    """True for `gs://…`, `s3://…`: stores without rename or fsync, where the manifest's presence is the commit."""
    return "://" in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
    """The path as Orbax wants it: it refuses a relative one."""
    return epath.Path(path) if is_object_store(path) else epath.Path(os.path.abspath(path))


def files_under(directory: epath.PathLike) -> list[str]:
    """Relative POSIX paths of all files under `directory` except the manifest, sorted."""
    found, folders = [], [(epath.Path(directory), "")]
    while folders:
        folder, prefix = folders.pop()
        for item in folder.iterdir():
            name = prefix + item.name
            if item.is_dir():
                folders.append((item, name + "/"))
            elif name != MANIFEST:
                found.append(name)
    return sorted(found)


def hash_files(directory: epath.PathLike, names: Iterable[str], flush: bool = False) -> dict[str, dict]:
    """Sums of some files: `{name: {"sha256": hex, "bytes": int}}`; with `flush`, local files are forced to the disk (fsync).

    Raises:
      OSError: a file cannot be read or flushed (a full disk shows here at the latest).
    """
    directory, sums = epath.Path(directory), {}
    flush = flush and not is_object_store(directory)
    for name in names:
        with (directory / name).open("rb") as file:
            digest, size = hashlib.sha256(), 0
            while block := file.read(1 << 22):
                digest.update(block)
                size += len(block)
            if flush:
                os.fsync(file.fileno())
        sums[name] = {"sha256": digest.hexdigest(), "bytes": size}
    return sums


def write_manifest(directory: epath.PathLike, step: int, sums: dict[str, dict]) -> None:
    """Writes `MANIFEST.json`; on a local disk flushes it and every folder of the checkpoint: a power cut keeps all or nothing."""
    directory = epath.Path(directory)
    text = json.dumps({"format": _FORMAT, "step": step, "files": sums}, indent=1, sort_keys=True)
    if is_object_store(directory):
        (directory / MANIFEST).write_text(text)
        return
    with open(os.fspath(directory / MANIFEST), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(os.fspath(directory)):
        fsync_folder(folder)


def fsync_folder(folder: epath.PathLike) -> None:
    """Makes the names in a local folder durable (a rename is only in memory until its folder is flushed)."""
    descriptor = os.open(os.fspath(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(directory: epath.PathLike, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with a checkpoint, as sentences without their full stop; empty if it is whole.

    Args:
      directory: one checkpoint, e.g. `<workdir>/checkpoints/000123`.
      share, shares: reads only every `shares`-th file from number `share` on, so that n processes split the reading.

    Example:
      >>> verify("runs/quickstart/checkpoints/000123")      # doctest: +SKIP
      ["arrays/d/3f2a: SHA-256 is 9b1c…, the manifest says 77e0…"]
    """
    directory = epath.Path(directory)
    if not directory.is_dir():
        return ["the directory does not exist"]
    if not (directory / MANIFEST).exists():
        return [f"{MANIFEST} is missing: the save never finished, or the file was lost"]
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files, step = manifest["files"], manifest["step"]
        expected = {name: (entry["sha256"], entry["bytes"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    problems = []
    if directory.name.isdigit() and step != int(directory.name):
        problems.append(f"{MANIFEST} is of step {step}, the directory is called {directory.name}")
    for name in sorted(expected)[share::shares]:
        sha256, size = expected[name]
        try:
            found = hash_files(directory, [name])[name]
        except OSError as error:
            missing = not (directory / name).exists()
            problems.append(f"{name}: missing" if missing else f"{name}: cannot be read ({error})")
            continue
        if found["bytes"] != size:
            problems.append(f"{name}: {found['bytes']} bytes, the manifest says {size}")
        elif found["sha256"] != sha256:
            problems.append(f"{name}: SHA-256 is {found['sha256'][:8]}…, the manifest says {sha256[:8]}…")
    return problems
