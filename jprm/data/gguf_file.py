"""GGUF, the one-file format of llama.cpp: opening it, and the tokenizer inside.

Needs the extra ``gguf``.
"""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jprm.data.files import check_file
from jprm.errors import UserError

# How text is split before merges apply. llama.cpp names these rules, tokenizers spells them; the two were compared text by
# text (tests/data). A wrong rule still encodes and decodes, into ids that the model has never seen in that context.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe")

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # gguf.TokenType; the others (unused rows, byte fallbacks) are not text


def open_gguf(path: str | pathlib.Path) -> Any:
    """A ``gguf.GGUFReader`` (memory-mapped: tensors are read when asked for).

    Raises:
      UserError: the extra is not installed, or the file is missing, truncated, a Git LFS pointer or no GGUF.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "no package gguf",
            expected="the extra `gguf`, which reads .gguf files",
            where=str(path),
            fix="Install it: pip install 'jprm[gguf]'",
        )
    import gguf

    path = check_file(path)
    try:
        return gguf.GGUFReader(path)
    except (
        ValueError,
        IndexError,
        KeyError,
        OSError,
        TypeError,
        UnicodeDecodeError,
    ) as e:  # what the reader meets in damaged bytes
        raise UserError(
            f"a damaged or truncated file ({e})",
            expected="a complete GGUF file",
            where=str(path),
            fix="Copy or download the file again",
        ) from e


def gguf_fields(path: str | pathlib.Path) -> dict[str, Any]:
    """The file's metadata, ``{"llama.block_count": 30, …}``."""
    return {key: field.contents() for key, field in open_gguf(path).fields.items()}


def gguf_tokenizer(path: str | pathlib.Path, fields: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a ``.gguf`` file, with its chat template and special tokens.

    Args:
      path: the file.
      fields: its metadata, where already read.

    Raises:
      UserError: not a byte-level BPE, or a pre-tokenizer outside :data:`PRE_TOKENIZERS`.
    """
    fields = gguf_fields(path) if fields is None else fields
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    for key, value, known in (("tokenizer.ggml.model", kind, ("gpt2",)), ("tokenizer.ggml.pre", pre, PRE_TOKENIZERS)):
        if value not in known:
            raise UserError(
                f"{key} = {value!r}",
                expected=f"one of {', '.join(known)} (byte-level BPE)",
                where=str(path),
                fix="Set config.tokenizer.path to the model's tokenizer in Hugging Face form",
            )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {t: i for i, (t, y) in enumerate(zip(tokens, types)) if y in (NORMAL, CONTROL, USER_DEFINED)}
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        words = Regex(_WORDS % ("{1,3}" if pre == "llama-bpe" else ""))
        split = [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()

    # Added tokens must come in the order of their ids, or tokenizers would number them anew.
    tokenizer.add_tokens(
        [AddedToken(t, special=y == CONTROL, normalized=False) for t, y in zip(tokens, types) if y in (CONTROL, USER_DEFINED)]
    )
    special = {
        f"{role}_token": tokens[i]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (i := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    if fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    architecture = fields.get("general.architecture")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=fields.get(f"{architecture}.context_length"),
        **special,
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    return wrapped


def gguf_stop_ids(fields: Mapping[str, Any]) -> set[int]:
    """End of text, of turn and of message, where the file names them."""
    ids = (fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    return {int(i) for i in ids if i is not None}
