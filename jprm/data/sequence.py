"""The one builder of token sequences: prompt ids, then response ids, joined as ids and never re-tokenised.

Tokenising joined text and looking for the border afterwards shifts it wherever the tokenizer merges across it; every sequence
of training, evaluation and scoring is therefore built here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jprm.errors import UserError

Prompt = str | list[dict[str, Any]]
TEMPLATES = ("auto", "chat", "plain")


def encode_prompt(tokenizer: Any, prompt: Prompt, *, template: str = "auto", system: str = "") -> list[int]:
    """Ids of a prompt up to where the response begins.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: text, or chat messages.
      template: ``chat`` puts it through the tokenizer's chat template (text becomes one user message) and opens the assistant's turn;
        ``plain`` takes the text as it is; ``auto`` is ``chat`` where the tokenizer has a template.
      system: system prompt of the chat form; a prompt that brings its own keeps it.

    Raises:
      UserError: an unknown template, ``chat`` without a template, or messages or a system prompt with ``plain``.
    """
    if template not in TEMPLATES:
        raise UserError(f"template {template!r}", expected=f"one of {', '.join(TEMPLATES)}", where="config.tokenizer.template", fix="Set config.tokenizer.template=auto")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has_template:
        raise UserError("a tokenizer without a chat template", expected="one that has it", where="config.tokenizer.template", fix="Set config.tokenizer.template=plain")
    if template == "plain" or not has_template:
        if not isinstance(prompt, str):
            raise UserError("a prompt of chat messages", expected="plain text, as there is no chat template in use", where="config.tokenizer.template",
                            fix="Use a tokenizer with a chat template, or prompts that are text")
        if system:
            raise UserError(f"system prompt {system[:40]!r}", expected="none where there is no chat template in use", where="config.tokenizer.system",
                            fix="Set config.tokenizer.system=''")
        return tokenizer.encode(prompt, add_special_tokens=False)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Ids of a whole response, its end-of-text id included."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]], length: int) -> dict[str, np.ndarray]:
    """(prompt ids, response ids) rows as right-padded arrays: ``tokens`` i32[B, length], ``lengths`` and ``prompt_lengths`` i32[B].

    Raises:
      ValueError: a row is longer than ``length``; rows are dropped or refused by their reader, never cut here.
    """
    tokens = np.zeros((len(rows), length), np.int32)
    lengths, prompt_lengths = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    for i, (prompt, response) in enumerate(rows):
        ids = [*prompt, *response]
        if len(ids) > length:
            raise ValueError(f"a row of {len(ids)} tokens in a window of {length}")
        tokens[i, : len(ids)], lengths[i], prompt_lengths[i] = ids, len(ids), len(prompt)
    return {"tokens": tokens, "lengths": lengths, "prompt_lengths": prompt_lengths}


def separator_mask(tokenizer: Any, separator: str) -> np.ndarray:
    """bool[len(tokenizer)]: ids whose text contains the separator (``"\\n"`` alone, ``".\\n"``, ``"\\n\\n"``, … in a byte-level BPE).

    Special tokens end no step. Ids are decoded one by one, which is exact for ASCII separators: no UTF-8 sequence contains one.
    """
    mask = np.zeros(len(tokenizer), bool)
    if separator:
        special = set(tokenizer.all_special_ids)
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        for i, text in enumerate(texts):
            mask[i] = separator in text and i not in special
    return mask
