"""A model's tokenizer, and the checks that keep it in step with the model."""

import pathlib
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jprm.data.files import read_json
from jprm.errors import UserError


def load_tokenizer(path: str | pathlib.Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory in Hugging Face form, or the one inside a ``.gguf`` file. Local files only.

    A tokenizer without a padding token gets its end-of-text token as one. That changes no id and no vocabulary size:
    jprm's masks come from lengths, never from token values, so the two may be the same.

    Raises:
      UserError: no such path, files that transformers cannot load without custom code, or no end-of-text token.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        from jprm.data.gguf_file import gguf_tokenizer  # needs the extra `gguf`

        tokenizer = gguf_tokenizer(path)
    else:
        if not path.is_dir():
            raise UserError(
                "no such directory" if not path.exists() else "a file",
                expected="a directory with tokenizer files, or a .gguf file",
                where=str(path),
                fix="Set config.tokenizer.path to a local tokenizer; jprm downloads nothing",
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # transformers and tokenizers raise bare Exception, KeyError, … for unreadable files
            raise UserError(
                f"a tokenizer that does not load ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})",
                expected="tokenizer.json and tokenizer_config.json",
                where=str(path),
                fix="Copy the tokenizer files of the model into the directory, or set config.tokenizer.path",
            ) from e
    if tokenizer.eos_token_id is None:
        raise UserError(
            "no eos_token",
            expected="a tokenizer that can end a text",
            where=str(path),
            fix="Add eos_token to tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(path: str | pathlib.Path | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response, ascending: the union of the tokenizer's and the model's own.

    One alone is the best known way to a model that never stops: chat models end turns with one id and texts with another,
    and the two files each name one of them.

    Args:
      path: model directory (its ``generation_config.json``, else its ``config.json``) or ``.gguf`` file; None: no model.
      tokenizer: the tokenizer in use.
    """
    ids = {tokenizer.eos_token_id}
    if path is not None and pathlib.Path(path).suffix == ".gguf":
        from jprm.data.gguf_file import gguf_fields, gguf_stop_ids

        ids |= gguf_stop_ids(gguf_fields(path))
    elif path is not None:
        for name in ("generation_config.json", "config.json"):  # transformers reads the second only where the first is absent
            if (pathlib.Path(path) / name).exists():
                ids |= _eos_ids(read_json(pathlib.Path(path) / name), pathlib.Path(path) / name)
                break
    return tuple(sorted(i for i in ids if i is not None))


def _eos_ids(config: dict[str, Any], where: pathlib.Path) -> set[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise UserError(
            f"eos_token_id = {value!r}",
            expected="a token id or a list of them",
            where=str(where),
            fix="Use the file that belongs to the model",
        )
    return set(ids)


def check_vocab(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, where: str = "config.tokenizer") -> None:
    """Raises a UserError if the tokenizer can emit an id the model has no row for. Rows without a token are fine (padding)."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise UserError(
            f"token {token!r} with id {largest}",
            expected=f"ids below the model's vocabulary of {vocab_size}",
            where=where,
            fix="Use the tokenizer that belongs to the model",
        )
