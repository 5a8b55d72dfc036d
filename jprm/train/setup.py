"""From a config to what a run is made of: model shape, mesh, task, tokenizer. Every check that needs no device memory is here."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jprm.data.sequence import SequenceBuilder, separator_mask
from jprm.data.tokenizer import check_vocab, load_tokenizer, stop_ids
from jprm.errors import UserError, one_of
from jprm.model.config import ModelConfig
from jprm.model.hf_config import load_config
from jprm.model.hf_export import DTYPES
from jprm.model.hf_load import check_weights, load_params, open_weights
from jprm.model.sampling import Sampling
from jprm.model.spec import Params, init_params, param_shardings
from jprm.sharding.mesh import check_divides, make_mesh
from jprm.tasks.task import Task, make_task
from jprm.train.bounds import check_numbers
from jprm.train.manifest import is_object_store

REMAT = ("none", "full", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
ROWS = ("data", "fsdp")


@dataclasses.dataclass
class Run:
    """What every verb works with.

    Attributes:
      config: resolved and locked.
      workdir: its folder (nothing is written there yet).
      cfg: shape of policy, PRM and reference.
      mesh: over all devices.
      task, tokenizer, builder: what is asked, in which ids, and how sequences are put together.
      stop_ids: ids that end a response.
      is_separator, is_stop: bool[V] by token id.
      sampling: how the policy's responses are drawn in training.
    """

    config: Any
    workdir: pathlib.Path
    cfg: ModelConfig
    mesh: Mesh
    task: Task
    tokenizer: Any
    builder: SequenceBuilder
    stop_ids: tuple[int, ...]
    is_separator: np.ndarray
    is_stop: np.ndarray
    sampling: Sampling

    @property
    def row_shards(self) -> int:
        return math.prod(self.mesh.shape[a] for a in ROWS)

    @property
    def length(self) -> int:
        """T: tokens of a whole rollout row."""
        return self.config.sampling.max_prompt + self.config.sampling.max_new

    def load(self, path: str) -> Params:
        """Parameters from a Hugging Face directory or GGUF file, into the mesh."""
        return load_params(path, self.cfg, self.mesh)

    def initial_params(self) -> Params:
        """The policy's first parameters: loaded, or drawn from the seed."""
        if self.config.model.path:
            return self.load(self.config.model.path)
        init = jax.jit(init_params, static_argnums=0, out_shardings=param_shardings(self.cfg, self.mesh))
        return init(self.cfg, jax.random.fold_in(jax.random.key(self.config.seed), 2**31 - 1))


def build(config: Any) -> Run:
    """Resolves a config. Allocates nothing on devices.

    Raises:
      UserError: whatever does not fit together, before anything is allocated or written.
    """
    if is_object_store(config.workdir):
        raise UserError(
            config.workdir,
            expected="a local folder, or a mounted one: metrics and logs are appended to",
            where="config.workdir",
            fix="Name a local folder and copy its checkpoints/ to the store",
        )
    check_numbers(config)
    check_names(config)
    for key in ("model", "prm"):
        if config[key].path and not pathlib.Path(config[key].path).exists():
            raise UserError(
                f"no file or folder {config[key].path!r}",
                expected="a Hugging Face model directory or a .gguf file",
                where=f"config.{key}.path",
                fix=f"Set config.{key}.path to a local model; jprm downloads nothing",
            )
    mesh = make_mesh(config.mesh)
    task = make_task(config.task, seed=config.seed)
    tokenizer = _tokenizer(config, task)
    cfg = model_config(config, tokenizer)
    check_vocab(tokenizer, cfg.vocab_size)
    if config.prm.path:
        check_weights(open_weights(config.prm.path), cfg)
    builder = SequenceBuilder(tokenizer, template=config.tokenizer.template, system=config.tokenizer.system)
    stops = tuple(sorted({*stop_ids(config.model.path or None, tokenizer), builder.end_id}))
    s = config.sampling
    if s.max_prompt < 1 or s.max_prompt + s.max_new > cfg.max_position_embeddings:
        raise UserError(
            f"max_prompt + max_new = {s.max_prompt} + {s.max_new} tokens",
            expected=f"at most the model's {cfg.max_position_embeddings}, and a prompt",
            where="config.sampling",
            fix="Lower config.sampling.max_prompt or config.sampling.max_new",
        )
    sampling = Sampling(
        max_new=s.max_new, min_new=s.min_new, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, stop_ids=stops
    )
    check_layout(config, cfg, mesh)
    ids = np.zeros(cfg.vocab_size, bool)
    ids[list(stops)] = True
    marks = separator_mask(tokenizer, config.task.separator or task.separator, cfg.vocab_size)
    workdir = pathlib.Path(config.workdir or f"runs/{config.name}")
    return Run(config, workdir, cfg, mesh, task, tokenizer, builder, stops, marks, ids, sampling)


def check_names(config: Any) -> None:
    """Raises a UserError for what would be noticed only when a later phase, or the end of the run, reads it."""
    one_of(config.export.dtype, ("auto", *DTYPES), where="config.export.dtype")
    one_of(config.prm.reference_logps, ("recompute", "cache"), where="config.prm.reference_logps")
    stops = config.sampling.stop_strings
    if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
        raise UserError(
            f"{stops!r}",
            expected="a tuple of texts that are not empty",
            where="config.sampling.stop_strings",
            fix="Set config.sampling.stop_strings=\"('Question:',)\"",
        )
    if config.rl.band_low > config.rl.band_high:
        raise UserError(
            f"an empty band, {config.rl.band_low} to {config.rl.band_high}",
            expected="rl.band_low at most rl.band_high",
            where="config.rl.band_low",
            fix="Set config.rl.band_low=0.0",
        )


def _tokenizer(config: Any, task: Task) -> Any:
    path = config.tokenizer.path or config.model.path
    if path:
        return load_tokenizer(path)
    if task.make_tokenizer is None:
        raise UserError(
            "no model and no tokenizer",
            expected=f"one of them: the task {config.task.name!r} brings no tokenizer",
            where="config.model.path",
            fix="Set config.model.path to a local model directory or .gguf file (or, from scratch, config.tokenizer.path)",
        )
    return task.make_tokenizer()


def model_config(config: Any, tokenizer: Any) -> ModelConfig:
    """The model's shape: the checkpoint's, or the config's with the tokenizer's vocabulary; numerics from the config."""
    m = config.model
    one_of(m.dtype, ("auto", "float32", "bfloat16"), where="config.model.dtype")
    dtype = m.dtype if m.dtype != "auto" else ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    one_of(m.remat, REMAT, where="config.model.remat")
    if m.path:
        cfg = load_config(m.path)
        check_weights(open_weights(m.path), cfg)
    else:
        one_of(m.family, ("llama", "qwen2"), where="config.model.family")
        cfg = ModelConfig(
            family=m.family,
            vocab_size=len(tokenizer),
            hidden_size=m.hidden_size,
            intermediate_size=m.intermediate_size,
            num_layers=m.num_layers,
            num_heads=m.num_heads,
            num_kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            tie_word_embeddings=m.tie_word_embeddings,
            qkv_bias=m.family == "qwen2",
            max_position_embeddings=m.max_position_embeddings,
        )
    return cfg.replace(dtype=dtype, remat=m.remat, logits_chunk=m.logits_chunk, unroll=m.unroll)


def check_layout(config: Any, cfg: ModelConfig, mesh: Mesh) -> None:
    """Everything that has to divide does: heads and widths over the mesh, rows over its shards, minibatches over rows."""
    tensor = ("tensor",)
    check_divides(cfg.num_kv_heads, mesh, tensor, what="key/value heads", where="config.model.num_kv_heads")
    check_divides(cfg.intermediate_size, mesh, tensor, what="MLP width", where="config.model.intermediate_size")
    check_divides(cfg.vocab_size, mesh, tensor, what="vocabulary", where="config.mesh.tensor")
    check_divides(cfg.hidden_size, mesh, ("fsdp",), what="model width", where="config.model.hidden_size")
    shards, r = math.prod(mesh.shape[a] for a in ROWS), config.rl
    if config.sft.steps:
        _check_rows(config.sft.batch_size, 1, config.sft.micro_batch, shards, "config.sft")
    if config.prm.steps:
        _check_rows(config.prm.batch_size, 1, config.prm.micro_batch, shards, "config.prm")
    if r.iterations:
        _check_rows(r.prompts * r.group, r.minibatches, r.micro_batch, shards, "config.rl")
        _check_rows(r.prompts * r.group, r.prm_minibatches, r.micro_batch, shards, "config.rl", key="prm_minibatches")
        if r.oversample > 1 and r.prompts % shards:
            raise UserError(
                f"{r.prompts} prompts on {shards} row shards",
                expected=f"a multiple of {shards} where config.rl.oversample > 1",
                where="config.rl.prompts",
                fix=f"Set config.rl.prompts={math.ceil(r.prompts / shards) * shards}",
            )


def micro_batches(rows: int, micro_batch: int) -> int:
    """How many micro-batches ``rows`` are cut into; a micro-batch of 0 or of all rows is no cut."""
    return 1 if not micro_batch or micro_batch >= rows else rows // micro_batch


def balanced(config: Any) -> bool:
    """Whether right and wrong rows weigh the same in the PRM's loss (``prm.balance``)."""
    one_of(config.prm.balance, ("batch", "none"), where="config.prm.balance")
    return config.prm.balance == "batch"


def _check_rows(rows: int, minibatches: int, micro_batch: int, shards: int, where: str, key: str = "minibatches") -> None:
    if rows % minibatches or (rows // minibatches) % shards:
        raise UserError(
            f"{rows} rows in {minibatches} minibatches on {shards} row shards",
            expected=f"minibatches of a multiple of {shards} rows",
            where=f"{where}.{key}" if minibatches > 1 else where,
            fix=f"Make rows (prompts x group, or batch_size) a multiple of {minibatches * shards}",
        )
    size = rows // minibatches
    if micro_batch and micro_batch < size and (size % micro_batch or micro_batch % shards):
        raise UserError(
            f"micro_batch={micro_batch} of {size} rows on {shards} row shards",
            expected=f"a divisor of {size} that is a multiple of {shards}",
            where=f"{where}.micro_batch",
            fix=f"Set {where}.micro_batch=0 (all at once) or to such a number",
        )
