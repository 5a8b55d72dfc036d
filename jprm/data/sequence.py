"""From text to ids, in one place: prompt ids and response ids are made apart and joined as ids, never as text.

Text that was joined and tokenised again can merge across the joint, and then the first response token is another one than the
policy was given. So training, evaluation, scoring and serving all come here.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jprm.errors import UserError, one_of

log = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]]
_MARK = "\u2756"  # stands for a response while the template's end of turn is looked up; no template holds it


class SequenceBuilder:
    """Prompts and responses as token ids.

    Args:
      tokenizer: a `transformers` tokenizer with an eos token.
      template: "chat" renders prompts through the tokenizer's chat template, with the opening of the assistant's turn; "plain"
        tokenises them as text, with the special tokens that the tokenizer puts in front by itself; "auto" is "chat" where the
        tokenizer has a template.
      system: system prompt of a chat; "" for none (a template may still insert its own).

    Attributes:
      end_id: what ends a response: the id that the chat template puts after the assistant's turn, else the eos id.
    """

    def __init__(self, tokenizer: Any, *, template: str = "auto", system: str = ""):
        one_of(template, ("auto", "chat", "plain"), where="config.tokenizer.template")
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            raise UserError(
                "a tokenizer without a chat template",
                expected="a chat template in the tokenizer's files",
                where="config.tokenizer.template",
                fix='Set config.tokenizer.template="plain"',
            )
        self.tokenizer, self.chat, self.system = tokenizer, has_template and template != "plain", system
        if system and not self.chat:
            raise UserError(
                "a system prompt for plain text",
                expected="a chat template to put it into",
                where="config.tokenizer.system",
                fix='Set config.tokenizer.system=""',
            )
        self.end_id = self._turn_end() if self.chat else tokenizer.eos_token_id

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, up to where the response starts.

        Raises:
          UserError: messages where prompts are plain text, or a chat template that refuses them.
        """
        if self.chat:
            return self._render(self._messages(prompt), add_generation_prompt=True, tokenize=True)
        if not isinstance(prompt, str):
            if len(prompt) != 1:
                raise UserError(
                    f"a prompt of {len(prompt)} messages",
                    expected="text",
                    where="config.tokenizer.template",
                    fix="Use a tokenizer with a chat template",
                )
            prompt = prompt[0]["content"]
        ids = self.tokenizer(prompt).input_ids
        # Some tokenizers end every text; a prompt goes on.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids

    def response_ids(self, response: str) -> list[int]:
        """Ids of a response, the end of turn included."""
        return [*self.tokenizer(response, add_special_tokens=False).input_ids, self.end_id]

    def encode(self, prompt: Prompt, response: str) -> tuple[list[int], int]:
        """(ids of prompt and response, number of prompt ids)."""
        front = self.prompt_ids(prompt)
        return front + self.response_ids(response), len(front)

    def decode_response(self, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """The text of response ids up to the first end of turn, eos or stop id.

        Other special tokens stay visible: a response that holds them is not the one that would be read without them.
        """
        stops = {self.end_id, self.tokenizer.eos_token_id, *map(int, stop_ids)}
        end = next((position for position, i in enumerate(ids) if int(i) in stops), len(ids))
        return self.tokenizer.decode([int(i) for i in ids[:end]], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, return_dict=False, **kwargs)
        except Exception as error:  # templates raise jinja's errors, whatever they were written to raise
            raise UserError(
                f"a chat template that refuses the roles {[m['role'] for m in messages]} ({error})",
                expected="a template that takes them",
                where="config.tokenizer.system" if self.system else "config.tokenizer.template",
                fix="Leave config.tokenizer.system empty" if self.system else 'Set config.tokenizer.template="plain"',
            ) from error

    def _turn_end(self) -> int:
        """The first id after an assistant's turn in the template, if it is a special token; the eos id otherwise.

        Base tokenizers with a chat template often name as eos the end of a document, not of a turn.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        tail = self._render(messages, tokenize=False).rpartition(_MARK)[2].lstrip()
        ids = self.tokenizer(tail, add_special_tokens=False).input_ids if tail else []
        special = {*self.tokenizer.all_special_ids, *(i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special)}
        return ids[0] if ids and ids[0] in special else self.tokenizer.eos_token_id


def separator_mask(tokenizer: Any, separator: str, vocab_size: int | None = None) -> np.ndarray:
    """Which ids end a reasoning step: those whose text holds the separator.

    With byte-level BPE a newline is rarely a token of its own ("." and a newline are one); whatever token brings the separator
    ends the step. A separator that is spread over two tokens is not seen.

    Args:
      separator: text such as "\\n" or ";".
      vocab_size: length of the result, the model's vocabulary; at least the tokenizer's. Rows past the tokenizer's are False.

    Returns:
      bool[V].

    Raises:
      UserError: no id holds the separator.
    """
    size = len(tokenizer)
    special = set(tokenizer.all_special_ids)
    mask = np.zeros(max(size, vocab_size or 0), bool)
    texts = tokenizer.batch_decode([[i] for i in range(size)], clean_up_tokenization_spaces=False)
    if separator:
        mask[:size] = [separator in text and i not in special for i, text in enumerate(texts)]
    if not mask.any():
        held = next((c for c in ("\n", ".", ";", ",", " ") if any(c in text for text in texts)), None)
        raise UserError(
            f"separator {separator!r}, which stands in no token of this tokenizer",
            expected="text that some single token holds",
            where="config.task.separator",
            fix=f"Set config.task.separator={json.dumps(held)}" if held else "Set it to a character that ends a step",
        )
    return mask


def fitting(rows: Sequence[Any], measure: Callable[[Any], int], limit: int, *, policy: str, what: str, where: str) -> list[int]:
    """The indices of the rows that fit; nothing is ever cut.

    Args:
      measure: length of a row in tokens.
      limit: most tokens that fit.
      policy: "drop" leaves longer rows out, counted in the log; "error" refuses the first.
      what: the rows' name in the plural, for messages.
      where: the config key that holds the limit.

    Raises:
      UserError: a row too long under "error", or none that fits.
    """
    lengths = [measure(row) for row in rows]
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(rows) and policy == "error" or rows and not kept:
        index = next(i for i, length in enumerate(lengths) if length > limit)
        raise UserError(
            f"{len(rows) - len(kept)} of {len(rows)} {what} too long, the first (row {index}) with {lengths[index]} tokens",
            expected=f"at most {limit} tokens",
            where=where,
            fix=f"Set {where}={max(lengths)} or shorten them",
        )
    if len(kept) < len(rows):
        text = "%s: %d of %d dropped for more than %d tokens (the longest has %d)"
        log.info(text, what, len(rows) - len(kept), len(rows), limit, max(lengths))
    return kept
