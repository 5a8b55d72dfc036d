"""A directory that ``transformers`` loads without custom code: config, weights, tokenizer, model card.

Written beside its final name and renamed at the end, so a directory of that name is always a whole one. Every process
takes part in gathering, tensor by tensor (one layer of a stacked parameter at a time); process 0 writes.
"""

import functools
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jprm.data.files import read_json
from jprm.data.tokenizer import check_vocab
from jprm.errors import UserError
from jprm.model.config import ModelConfig
from jprm.model.hf_config import config_from_hf, config_to_hf
from jprm.model.hf_load import INDEX, SINGLE, SafetensorsWeights, check_weights, hf_tensors
from jprm.model.model_card import model_card
from jprm.model.spec import Params

DTYPES = ("bfloat16", "float32")
# Everything a tokenizer may consist of. Copied as they are where the tokenizer came from a directory: saving it again
# rewrites them in the spelling of the transformers version that happens to run.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def export_model(
    params: Params,
    cfg: ModelConfig,
    out_dir: str | pathlib.Path,
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
    source_config: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    extra: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> pathlib.Path:
    """Writes a model for ``AutoModelForCausalLM``.

    Args:
      params: the tree of :func:`jprm.model.spec.param_specs`, under any sharding. Every process must call this.
      cfg: the model's shape. The vocabulary keeps its padding rows.
      out_dir: must not exist, or be empty.
      tokenizer: a transformers tokenizer; its files go along, chat template included.
      stop_ids: ids that end a response; ``generation_config.json`` lists them all.
      source_config: raw ``config.json`` of the model this one was trained from; its other keys are kept.
      dtype: ``"bfloat16"`` or ``"float32"`` of the tensors.
      extra: what the weights mean beyond a language model, written to ``jprm.json``. An implicit PRM gives ``beta``,
        ``reference`` and its step rule; the model card then shows how to score with it.
      max_shard_bytes: tensors are put into files of at most this size (a larger tensor has its own).

    Returns:
      ``out_dir``.

    Raises:
      UserError: the directory is not empty, the vocabulary or the stop ids do not fit, the architecture cannot be
        expressed, or the disk does not take it (nothing is left behind then).
    """
    out_dir = pathlib.Path(out_dir)
    temporary = out_dir.with_name(out_dir.name + ".partial")
    _check(cfg, out_dir, tokenizer, stop_ids, dtype)
    shards = _plan(cfg, jnp.dtype(dtype).itemsize, max_shard_bytes)

    def open_directory():
        if out_dir.is_dir():
            if any(out_dir.iterdir()):
                raise UserError(
                    "a directory that is not empty",
                    expected="a new directory",
                    where=str(out_dir),
                    fix="Give another name, or remove what is there",
                )
        elif out_dir.exists():
            raise UserError(
                "a file", expected="a new directory", where=str(out_dir), fix="Give another name, or remove what is there"
            )
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)

    def close_directory():
        _write_text_files(temporary, cfg, tokenizer, stop_ids, source_config, dtype, extra, shards)
        check_weights(SafetensorsWeights(temporary), config_from_hf(read_json(temporary / "config.json")))
        if out_dir.exists():
            out_dir.rmdir()
        temporary.rename(out_dir)

    main = jax.process_index() == 0
    _on_first_process(open_directory, out_dir)
    failure = None  # of process 0: it must go on gathering with the others, or they would wait for it forever
    gathered = _gather(params, cfg, dtype)
    for file, names in shards.items():
        tensors = {}
        for expected in names:
            name, value = next(gathered)
            assert name == expected
            if main and failure is None:
                tensors[name] = value
        if main and failure is None:
            try:
                save_file(tensors, temporary / file, metadata={"format": "pt"})
            except Exception as e:  # safetensors wraps the disk's error in its own type
                failure = e

    def finish():
        if failure is not None:
            raise failure
        close_directory()

    _on_first_process(finish, out_dir, clean=temporary)
    return out_dir


def _check(cfg: ModelConfig, out_dir: pathlib.Path, tokenizer: Any, stop_ids: Sequence[int], dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(
            f"dtype {dtype!r}",
            expected=f"one of {', '.join(DTYPES)}",
            where="config.export.dtype",
            fix="Set config.export.dtype='bfloat16'",
        )
    check_vocab(tokenizer, cfg.vocab_size)
    if not stop_ids or not all(0 <= i < cfg.vocab_size for i in stop_ids):
        raise UserError(
            f"stop ids {list(stop_ids)}",
            expected=f"at least one, each below the vocabulary of {cfg.vocab_size}",
            where=str(out_dir),
            fix="Give the tokenizer an eos_token: a model without stop ids never stops",
        )
    config_to_hf(cfg)  # raises where no architecture fits


def _on_first_process(action: Any, out_dir: pathlib.Path, clean: pathlib.Path | None = None) -> None:
    """Runs ``action`` on process 0 and makes every process raise if it failed there."""
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as e:
            error = e
            if clean is not None:
                shutil.rmtree(clean, ignore_errors=True)
    failed = error is not None
    if jax.process_count() > 1:
        failed = bool(multihost_utils.broadcast_one_to_all(np.int32(failed)))
    if isinstance(error, UserError):
        raise error
    if failed:
        cause = error or "see the log of process 0"
        raise UserError(
            f"an export that could not be written ({cause})",
            expected="a directory with room for the model",
            where=str(out_dir),
            fix="Free space or choose another disk, then export again",
        ) from error


def _plan(cfg: ModelConfig, item_bytes: int, max_shard_bytes: int) -> dict[str, list[str]]:
    """{file: its tensors}, in the order in which they are gathered."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, _, _, spec in hf_tensors(cfg):
        tensor = math.prod(spec.hf_shape) * item_bytes
        if groups[-1] and size + tensor > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _gather(params: Params, cfg: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """(HF name, host value in HF layout) of every tensor; one of them at a time leaves its sharding. Collective."""

    @functools.cache
    def take(everywhere: NamedSharding | None):
        def one(x, layer, stacked):
            return (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) if stacked else x).astype(dtype)

        return jax.jit(
            one, static_argnums=2, out_shardings=everywhere
        )  # the layer is traced: one program per shape, not per layer

    flat = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    for name, ours, layer, spec in hf_tensors(cfg):
        placement = getattr(flat[ours], "sharding", None)
        everywhere = NamedSharding(placement.mesh, PartitionSpec()) if isinstance(placement, NamedSharding) else None
        whole = take(everywhere)(flat[ours], layer or 0, layer is not None)
        yield name, np.ascontiguousarray(spec.to_hf(np.asarray(whole.addressable_data(0))))


def _write_text_files(
    directory: pathlib.Path,
    cfg: ModelConfig,
    tokenizer: Any,
    stop_ids: Sequence[int],
    source: Mapping[str, Any] | None,
    dtype: str,
    extra: Mapping[str, Any] | None,
    shards: Mapping[str, list[str]],
) -> None:
    def write(name: str, value: Any) -> None:
        (directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    ids = {k: v for k in ("bos_token_id", "eos_token_id", "pad_token_id") if (v := getattr(tokenizer, k, None)) is not None}
    write("config.json", {**config_to_hf(cfg, source=source, dtype=dtype), **ids})
    write("generation_config.json", {**ids, "eos_token_id": sorted(int(i) for i in stop_ids)})
    if len(shards) > 1:
        item = jnp.dtype(dtype).itemsize
        total = sum(math.prod(spec.hf_shape) * item for *_, spec in hf_tensors(cfg))
        write(
            INDEX,
            {"metadata": {"total_size": total}, "weight_map": {name: file for file, names in shards.items() for name in names}},
        )
    write_tokenizer(tokenizer, directory)
    if extra is not None:
        write("jprm.json", dict(extra))
    (directory / "README.md").write_text(model_card(tokenizer, cfg, dtype, extra), encoding="utf-8")


def write_tokenizer(tokenizer: Any, directory: pathlib.Path) -> None:
    """The tokenizer's files: unchanged where they come from a directory, else saved in the spelling every version reads."""
    source = pathlib.Path(getattr(tokenizer, "name_or_path", "") or "")
    if str(source) != "." and (source / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if _same_tokenizer(tokenizer, directory):
            return
        for name in _TOKENIZER_FILES:  # changed since it was loaded (another chat template, added tokens): save what is in memory
            (directory / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = read_json(path)
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name for it, unknown to 4
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # a mapping in 4, where the list has this other name
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _same_tokenizer(tokenizer: Any, directory: pathlib.Path) -> bool:
    from transformers import AutoTokenizer

    copy = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return copy.chat_template == tokenizer.chat_template and copy.get_vocab() == tokenizer.get_vocab()
