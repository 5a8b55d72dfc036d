"""Weights of a Hugging Face directory, straight into their target shardings.

Every header is read and checked before any array exists. Then each parameter is built shard by shard: a shard's layers
are read (only the rows and columns it holds), transposed and cast into one buffer, the buffer goes to its device and is
dropped. The host never holds more than the device arrays themselves and one shard.
"""

import gc
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh

from jprm.data.files import check_file, read_json
from jprm.errors import UserError
from jprm.model.config import ModelConfig
from jprm.model.spec import Params, ParamSpec, map_specs, named_specs
from jprm.sharding.rules import sharding

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F32", "BF16", "F16")
# Buffers that old versions of transformers saved; they follow from the config.
_NOT_A_PARAMETER = re.compile(r"\.rotary_emb\.inv_freq$")
_COMPARE_ROWS = 4096


class Weights(Protocol):
    """Named tensors in Hugging Face's layout: shapes at once, values on demand."""

    shapes: dict[str, tuple[int, ...]]

    def origin(self, name: str) -> str:
        """The file that holds a tensor, for errors."""

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """A slice (start, stop; no step) of every dimension."""


class SafetensorsWeights:
    """The safetensors files of one directory. Reads every header; no value.

    Raises:
      UserError: no safetensors, a truncated file or Git LFS pointer, a tensor in two files, an index that disagrees with
        the files, a tensor that is not fp32, bf16 or fp16.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        for file in self._files():
            check_file(self.path / file)
            try:
                handle = safetensors.safe_open(self.path / file, framework="numpy")
                names = list(handle.keys())
            except safetensors.SafetensorError as e:
                raise UserError(
                    f"a damaged or truncated file ({e})",
                    expected="a complete safetensors file",
                    where=str(self.path / file),
                    fix="Copy or download the file again",
                ) from e
            self._handles[file] = handle
            for name in names:
                if name in self._file:
                    raise UserError(
                        f"{name} also in {self._file[name]}",
                        expected="every tensor in one file",
                        where=str(self.path / file),
                        fix="Remove the file that does not belong to the checkpoint",
                    )
                view = handle.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise UserError(
                        f"{name} of type {view.get_dtype()}",
                        expected=f"one of {', '.join(DTYPES)}",
                        where=str(self.path / file),
                        fix="Use a checkpoint that was not quantised",
                    )
                self._file[name], self.shapes[name] = file, tuple(view.get_shape())
        self._check_index()

    def _files(self) -> list[str]:
        single, index = (self.path / SINGLE).exists(), (self.path / INDEX).exists()
        if single and index:
            raise UserError(
                f"{SINGLE} and {INDEX}",
                expected="one of them: two sets of weights would disagree silently",
                where=str(self.path),
                fix="Remove the one that is stale",
            )
        if index:
            files = sorted(set(self._weight_map().values()))
            for file in files:
                if not (self.path / file).exists():
                    raise UserError(
                        f"no file {file}",
                        expected="every file that the index names",
                        where=str(self.path / INDEX),
                        fix="Copy or download the missing file",
                    )
            return files
        if not single:
            others = sorted(p.name for p in self.path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".safetensors", ".gguf"))
            raise UserError(
                f"neither {SINGLE} nor {INDEX}" + (f", but {', '.join(others[:4])}" if others else ""),
                expected="weights as safetensors",
                where=str(self.path),
                fix="Convert the weights with transformers' save_pretrained",
            )
        return [SINGLE]

    def _weight_map(self) -> dict[str, str]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(
                "no weight_map",
                expected="a weight_map of tensor names to files",
                where=str(self.path / INDEX),
                fix="Copy or download the index again",
            )
        return weight_map

    def _check_index(self) -> None:
        if SINGLE in self._handles:
            return
        weight_map = self._weight_map()
        for name in sorted(weight_map.keys() ^ self._file.keys() | {n for n in weight_map if weight_map[n] != self._file.get(n)}):
            raise UserError(
                f"{name} in {self._file.get(name, 'no file')}",
                expected=f"it in {weight_map.get(name, 'no file (the index lacks it)')}",
                where=str(self.path / INDEX),
                fix="Copy or download the index and the shards of one checkpoint",
            )

    def origin(self, name: str) -> str:
        return str(self.path / self._file.get(name, INDEX if (self.path / INDEX).exists() else SINGLE))

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        return self._handles[self._file[name]].get_slice(name)[box]


def open_weights(path: str | pathlib.Path) -> Weights:
    """The tensors of a directory in Hugging Face form or of a ``.gguf`` file."""
    if pathlib.Path(path).suffix == ".gguf":
        from jprm.model.gguf import GGUFWeights  # needs the extra `gguf`

        return GGUFWeights(path)
    return SafetensorsWeights(path)


def hf_tensors(cfg: ModelConfig) -> Iterator[tuple[str, str, int | None, ParamSpec]]:
    """Every tensor a checkpoint of this model holds, in file order: (HF name, our name, layer or None, spec)."""
    specs = named_specs(cfg)
    flat = [(s.hf_name, n, None, s) for n, s in specs.items() if not s.stacked]
    yield from (t for t in flat if t[1] == "embed")
    for layer in range(cfg.num_layers):
        yield from ((s.hf_name.format(layer=layer), n, layer, s) for n, s in specs.items() if s.stacked)
    yield from (t for t in flat if t[1] != "embed")


def check_weights(weights: Weights, cfg: ModelConfig) -> None:
    """Do the tensors fit the model, one to one? Looks at names and shapes (and, where tied, at a superfluous head's values).

    Raises:
      UserError: a tensor without a parameter, a parameter without a tensor, a wrong shape, or a head that contradicts
        ``tie_word_embeddings``.
    """
    expected = {name: spec for name, _, _, spec in hf_tensors(cfg)}
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    spare_head = cfg.tie_word_embeddings and head in weights.shapes
    for name in weights.shapes:
        if name not in expected and not _NOT_A_PARAMETER.search(name) and not (spare_head and name == head):
            raise UserError(
                f"{name}, which the model does not have",
                expected=f"the {len(expected)} tensors of a {cfg.family} of {cfg.num_layers} layers",
                where=weights.origin(name),
                fix="Use the config.json that belongs to these weights",
            )
    for name, spec in expected.items():
        if name not in weights.shapes:
            tied = " (tie_word_embeddings is false)" if name == head else ""
            raise UserError(
                f"no tensor {name}{tied}",
                expected=f"one of shape {list(spec.hf_shape)}",
                where=weights.origin(name),
                fix="Set tie_word_embeddings to true if the model is tied, else use the complete checkpoint"
                if tied
                else "Use the complete checkpoint and the config.json that belongs to it",
            )
        if weights.shapes[name] != spec.hf_shape:
            raise UserError(
                f"{name} of shape {list(weights.shapes[name])}",
                expected=f"{list(spec.hf_shape)}",
                where=weights.origin(name),
                fix="Use the config.json that belongs to these weights",
            )
    if spare_head and not (weights.shapes[head] == weights.shapes[embed] and _equal(weights, head, embed)):
        raise UserError(
            f"{head}, different from {embed}",
            expected="no separate head, or an equal one: tie_word_embeddings is true",
            where=weights.origin(head),
            fix="Set tie_word_embeddings to false in config.json if the head is meant",
        )


def _equal(weights: Weights, a: str, b: str) -> bool:
    rows, width = weights.shapes[a]
    boxes = ((slice(i, min(i + _COMPARE_ROWS, rows)), slice(0, width)) for i in range(0, rows, _COMPARE_ROWS))
    return all(np.array_equal(weights.read(a, box), weights.read(b, box)) for box in boxes)


def read_window(weights: Weights, name: str, spec: ParamSpec, window: tuple[slice, ...]) -> np.ndarray:
    """``spec.from_hf(tensor)[window]``, reading only the rows and columns of the tensor that hold it.

    Args:
      window: one (start, stop) slice per dimension of our layout, without the layer axis.
    """
    theirs = spec.hf_shape[::-1] if spec.transpose else spec.hf_shape
    ours = spec.shape[1:] if spec.stacked else spec.shape
    box, shape, inside, i = [], [], [], 0
    for size in theirs:  # each of their dimensions is one of ours, or several merged: [H * Dh] for [H, Dh]
        j, merged = i + 1, ours[i]
        while merged < size:
            merged, j = merged * ours[j], j + 1
        width = size // ours[i]
        box.append(slice(window[i].start * width, window[i].stop * width))
        shape += [window[i].stop - window[i].start, *ours[i + 1 : j]]
        inside += [slice(None), *window[i + 1 : j]]
        i = j
    values = weights.read(name, tuple(box[::-1] if spec.transpose else box))
    return (values.T if spec.transpose else values).reshape(shape)[tuple(inside)]


def load_params(path: str | pathlib.Path, cfg: ModelConfig, mesh: Mesh | None = None, dtype: str = "float32") -> Params:
    """Parameters from a directory in Hugging Face form or a ``.gguf`` file.

    Args:
      path: the model.
      cfg: its shape, from :func:`jprm.model.hf_config.load_config`.
      mesh: where the parameters go, sharded by the rules; None: the default device.
      dtype: of the loaded parameters (fp32 masters, or the compute dtype of a frozen role).

    Returns:
      The tree of :func:`jprm.model.spec.param_specs`.

    Raises:
      UserError: as :class:`SafetensorsWeights` and :func:`check_weights`; nothing has been allocated then.
    """
    weights = open_weights(path)
    check_weights(weights, cfg)
    target = jnp.dtype(dtype)

    def shard(spec: ParamSpec, window: tuple[slice, ...]) -> np.ndarray:
        buffer = np.empty([s.stop - s.start for s in window], target)
        if spec.stacked:
            for i, layer in enumerate(range(window[0].start, window[0].stop)):
                buffer[i] = read_window(weights, spec.hf_name.format(layer=layer), spec, window[1:])
        else:
            buffer[...] = read_window(weights, spec.hf_name, spec, window)
        return buffer

    def settle(arrays: Any) -> Any:
        jax.block_until_ready(arrays)
        gc.collect(0)  # jax lets go of the buffers it has copied in a callback of the collector: without it several linger
        return arrays

    def one(spec: ParamSpec) -> jax.Array:
        whole = tuple(slice(0, n) for n in spec.shape)
        if mesh is None:
            return settle(jax.device_put(shard(spec, whole)))
        placement = sharding(mesh, spec.axes)
        devices_of: dict[tuple, list[jax.Device]] = {}  # replicas are read once; slices are not hashable before Python 3.12
        for device, index in placement.addressable_devices_indices_map(spec.shape).items():
            devices_of.setdefault(tuple(s.indices(n)[:2] for s, n in zip(index, spec.shape)), []).append(device)
        arrays = []
        for bounds, devices in devices_of.items():
            buffer = shard(spec, tuple(slice(*b) for b in bounds))
            arrays += settle([jax.device_put(buffer, d) for d in devices])
            del buffer  # before the next one is built
        return jax.make_array_from_single_device_arrays(spec.shape, placement, arrays)

    return map_specs(one, cfg)
