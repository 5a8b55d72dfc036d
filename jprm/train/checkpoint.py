"""Checkpoints on disk: what one holds, which ones are whole, and how one is read back.

    <workdir>/checkpoints/000123/      the state after 123 iterations
        arrays/         every array of the state, by Orbax, under its name in the tree ("policy.params.layers.wq")
        meta.json       everything else: resolved config, code version, name, shape and dtype of every array
        MANIFEST.json   SHA-256 of every file above, written last

Writing is in `saver.py`.
"""

import functools
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jprm.errors import UserError
from jprm.train import manifest

ARRAYS, META = "arrays", "meta.json"
_NUMBER = re.compile(r"\d{6,}")
_log = logging.getLogger(__name__)


def numbered(directory: epath.PathLike) -> list[epath.Path]:
    """Every folder that is named like a checkpoint, whole or not, newest first."""
    directory = manifest.absolute(directory)
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NUMBER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def latest(directory: epath.PathLike) -> list[epath.Path]:
    """Complete checkpoints (those with a manifest; its sums are not checked here), newest first."""
    return [path for path in numbered(directory) if (path / manifest.MANIFEST).exists()]


# ---------------------------------------------------------------------------------------------------------------- the tree


def leaves_by_name(state: Any) -> dict[str, Any]:
    """`{"policy.params.layers.wq": leaf, …}`. Arrays are stored flat under these names, so that a file does not depend on the
    Python classes of the tree (Orbax gives optax's named tuples back as lists) and one role can be read without the others."""
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def describe(leaf: Any) -> dict[str, Any]:
    """Shape and dtype of a leaf as JSON; typed PRNG keys have dtypes like "key<fry>"."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return {"shape": list(np.shape(leaf)), "dtype": str(dtype)}


def state_bytes(state: Any) -> int:
    """Bytes of all arrays of a (concrete or abstract) state over all devices, counted once."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(state))


def _bytes(leaf: Any) -> int:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
        dtype = leaf.dtype
    return int(np.size(leaf)) * dtype.itemsize


def _check_tree(stored: dict[str, dict], wanted: dict[str, dict], path: epath.Path, partial: bool) -> None:
    missing = [name for name in wanted if name not in stored]
    extra = [] if partial else [name for name in stored if name not in wanted]
    wrong = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    if not (missing or extra or wrong):
        return

    def form(entry):
        return f"{entry['dtype']}{entry['shape']}"

    name = (wrong or missing or extra)[0]
    count = len(missing) + len(extra) + len(wrong)
    more = f" ({count} arrays differ in all)" if count > 1 else ""
    raise UserError(
        (form(stored[name]) if name in stored else "no such array") + more,
        expected=form(wanted[name]) if name in wanted else "no such array in this run's state",
        where=f"array {name!r} of checkpoint {path}",
        fix="Use the config the checkpoint was written with (config.json beside it), or a new config.workdir",
    )


# ----------------------------------------------------------------------------------------------------------------- reading


def restore(
    directory: epath.PathLike, abstract_for_meta: Callable[[dict], Any], step: int | None = None, *, partial: bool = False
) -> tuple[Any, dict] | None:
    """Reads the newest whole checkpoint; a damaged one is passed over with a warning that names it and what is used instead.

    All sums of a checkpoint are verified before the first array is read. On several processes every one must call this; each
    verifies its share of the files.

    Args:
      directory: `<workdir>/checkpoints`.
      abstract_for_meta: meta -> tree of `jax.ShapeDtypeStruct` *with shardings*: the state to fill. It is given `meta.json` so
        that it can look at the stored config first, e.g. with `same_run.check_same_run`. Shardings may differ from the saved.
      step: read exactly this one; then nothing else is tried.
      partial: the abstract state may name only some of the stored arrays (one role of several).

    Returns:
      (state, meta), or None if there is nothing at all that is named like a checkpoint.

    Raises:
      UserError: all are damaged, there is none of that step, or the stored arrays do not fit the abstract state.
    """
    candidates = numbered(directory)
    if step is not None:
        found = [path.name for path in candidates]
        candidates = [path for path in candidates if int(path.name) == step]
        if not candidates:
            raise UserError(
                f"no checkpoint of step {step}",
                expected=f"one of {', '.join(found) or '(there are none)'}",
                where=os.fspath(directory),
                fix="Name a step that is there, or none for the newest",
            )
    if not candidates:
        return None
    damaged: list[tuple[epath.Path, list[str]]] = []
    for path in candidates:
        problems = _verify_together(path)
        if not problems:
            break
        damaged.append((path, problems))
    else:
        raise UserError(
            "; ".join(f"{path.name}: {_few(problems)}" for path, problems in damaged),
            expected="a checkpoint whose files match its manifest",
            where=os.fspath(directory),
            fix="Bring the files back from a copy, or start anew with another config.workdir",
        )
    for bad, problems in damaged:
        _log.warning("checkpoint %s is damaged (%s); going on from %s instead", bad, _few(problems), path)
    meta = json.loads((path / META).read_text())
    state = _read(path, meta, abstract_for_meta(meta), partial)
    _log.info("restored %s", path)
    return state, meta


def _read(path: epath.Path, meta: dict, abstract: Any, partial: bool) -> Any:
    wanted = leaves_by_name(abstract)
    stored = meta["leaves"]
    _check_tree(stored, {name: describe(leaf) for name, leaf in wanted.items()}, path, partial)
    for name, leaf in wanted.items():
        if getattr(leaf, "sharding", None) is None:  # Orbax would take the sharding of the topology that saved
            raise ValueError(f"the abstract leaf {name} has no sharding")
    template = {name: wanted.get(name, ocp.PLACEHOLDER) for name, entry in stored.items() if 0 not in entry["shape"]}
    arrays = ocp.load(path / ARRAYS, template)
    state = jax.tree.unflatten(
        jax.tree.structure(abstract),
        [
            # Orbax stores no empty arrays; there is nothing to store.
            jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) if 0 in leaf.shape else arrays[name]
            for name, leaf in wanted.items()
        ],
    )
    return state


def _verify_together(path: epath.Path) -> list[str]:
    processes = jax.process_count()
    problems = manifest.verify(path, jax.process_index(), processes)
    if processes > 1:
        worst = int(np.max(multihost_utils.process_allgather(np.int32(len(problems)))))
        if worst and not problems:
            problems = ["another process found damaged files"]
    return problems


def _few(problems: list[str]) -> str:
    return "; ".join(problems[:2]) + (f"; and {len(problems) - 2} more" if len(problems) > 2 else "")


# ------------------------------------------------------------------------------------------------------------ code version


@functools.cache  # what the process runs is what it imported at its start
def code_version() -> dict[str, str | None]:
    """`{"jprm": "0.1.0", "git": "<hash>[-dirty]" | None, "jax": "0.10.2", …}`; git only if the package runs from its checkout."""
    versions = {}
    for package in ("jprm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {**versions, "git": _git_hash()}


def _git_hash() -> str | None:
    root = epath.Path(__file__).parent.parent.parent
    if not (root / ".git").exists():  # never the hash of some other repository that the package is installed into
        return None
    try:
        git = ["git", "-C", os.fspath(root)]
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if dirty else "")
