"""The README.md of an exported model. Its code blocks are executed by the tests."""

from collections.abc import Mapping
from typing import Any

from jprm.model.config import ModelConfig

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "."  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
{encode}
ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:]))
```
"""

_CHAT = """messages = [{"role": "user", "content": "What is 12 + 30?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""

_PLAIN = """inputs = tokenizer("17+5-9=", return_tensors="pt", return_token_type_ids=False)"""

_SCORE = '''## Process rewards

This is an implicit process reward model: the reward of a token is `beta` times the log-ratio between this model and its
reference, and the score of a prefix is the sum over it (beta = {beta}, reference: `{reference}`; see `jprm.json`).
Build `prompt_ids` and `response_ids` from token ids, as in training; re-tokenising joined text can move the boundaries.

```python
import torch

def token_logps(model, prompt_ids, response_ids):
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        logps = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logps.gather(1, ids[0, 1:, None])[len(prompt_ids) - 1:, 0]

def token_rewards(model, reference, prompt_ids, response_ids, beta={beta}):
    """[N] reward of every response token; cumsum gives the score of every prefix."""
    return beta * (token_logps(model, prompt_ids, response_ids) - token_logps(reference, prompt_ids, response_ids))
```
'''


def model_card(tokenizer: Any, cfg: ModelConfig, dtype: str, extra: Mapping[str, Any] | None) -> str:
    """Markdown: what it is, how to load it, and for an implicit PRM (``extra["beta"]``) how to score with it."""
    encode = _CHAT if getattr(tokenizer, "chat_template", None) else _PLAIN
    prm = extra is not None and "beta" in extra
    parts = [
        "---",
        "library_name: transformers",
        "---",
        "",
        f"# {'Implicit process reward model' if prm else 'Language model'} trained with jprm",
        "",
        f"{cfg.family}, {cfg.num_layers} layers of width {cfg.hidden_size}, {cfg.vocab_size} vocabulary rows, {dtype}.",
        "",
        _LOAD.format(encode=encode),
    ]
    if prm:
        parts.append(_SCORE.format(beta=extra["beta"], reference=extra.get("reference", "not recorded")))
    return "\n".join(parts)
