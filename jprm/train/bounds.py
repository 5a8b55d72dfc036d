"""Which numbers a config may hold. The table has a line for every numeric field; a test keeps it complete."""

import math
from typing import Any, NamedTuple

from jprm.errors import UserError
from jprm.train.config import flat


class Bound(NamedTuple):
    """Numbers from ``low`` to ``high``; ``low`` itself is out where ``above``, ``high`` where ``below``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, x: float) -> bool:
        over = x > self.low if self.above else x >= self.low
        under = x < self.high if self.below else x <= self.high
        return math.isfinite(x) and over and under

    def __str__(self) -> str:
        low = f"{'more than' if self.above else 'at least'} {self.low:g}" if self.low > -math.inf else ""
        high = f"{'less than' if self.below else 'at most'} {self.high:g}" if self.high < math.inf else ""
        return " and ".join(filter(None, (low, high))) or "a finite number"

    def nearest(self, x: float) -> str:
        """What to set instead, in words."""
        end = self.high if self.high <= x < math.inf else self.low if math.isfinite(self.low) else 0.0
        is_open = self.above and end == self.low or self.below and end == self.high
        return " to such a number" if is_open else f"={end:g}"


FINITE, COUNT, SIZE = Bound(), Bound(0), Bound(1)
POSITIVE, SHARE, DECAY = Bound(0, above=True), Bound(0, 1), Bound(0, 1, below=True)
OPTIMIZER = {
    **dict.fromkeys(("lr", "lr_end", "warmup", "weight_decay", "clip_norm"), COUNT),
    **dict.fromkeys(("b1", "b2"), DECAY),
    "eps": POSITIVE,
}
SIZES = {
    "model": (
        *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
        *("max_position_embeddings", "logits_chunk", "unroll"),
    ),
    "sampling": ("max_prompt", "max_new"),
    "sft": ("batch_size",),
    "prm": ("batch_size", "max_steps"),
    "rl": ("prompts", "group", "oversample", "prm_minibatches", "epochs", "minibatches"),
    "eval": ("samples", "batch"),
    "checkpoint": ("keep",),
    "log": ("max_skipped",),
}
COUNTS = {
    "sampling": ("min_new", "top_k"),
    "sft": ("steps", "max_length", "micro_batch"),
    "prm": ("steps", "max_length", "micro_batch"),
    "rl": ("iterations", "micro_batch", "prm_warmup", "dual_clip", "kl_coef", "scale_floor", "ddof"),
    "eval": ("every", "problems", "pass_k"),
    "checkpoint": ("every",),
    "log": ("every_s", "samples_every", "samples_rows"),
}
BOUNDS: dict[str, Bound] = {
    "seed": Bound(0, 2**32 - 1),
    **{f"{group}.{name}": SIZE for group, names in SIZES.items() for name in names},
    **{f"{group}.{name}": COUNT for group, names in COUNTS.items() for name in names},
    **{f"{phase}.optimizer.{name}": bound for phase in ("sft", "prm", "rl") for name, bound in OPTIMIZER.items()},
    **dict.fromkeys(("mesh.data", "mesh.fsdp", "mesh.tensor"), Bound(-1)),
    "task.split_by_hash": DECAY,
    "task.verifier_timeout_s": POSITIVE,
    "task.verifier_workers": SIZE,
    "sampling.temperature": COUNT,  # 0 is greedy
    "sampling.top_p": Bound(0, 1, above=True),
    "prm.beta": POSITIVE,
    "prm.score_scale": POSITIVE,
    "rl.band_low": FINITE,  # a verifier of the user's may give any score
    "rl.band_high": FINITE,
    "rl.outcome_weight": FINITE,
    "rl.process_weight": FINITE,
    "rl.outcome_gamma": SHARE,
    "rl.process_gamma": SHARE,
    "rl.clip_low": SHARE,
    "rl.clip_high": COUNT,
    "rl.entropy_coef": FINITE,
    "rl.eps": POSITIVE,
}


def numbers(config: Any) -> dict[str, float]:
    """Dotted names of a config's numeric fields, those of ``task.options`` aside, to their values."""
    fields = ((key, value) for key, value in flat(config) if not key.startswith("task.options."))
    return {key: value for key, value in fields if isinstance(value, (int, float)) and not isinstance(value, bool)}


def check_numbers(config: Any) -> None:
    """Raises a UserError for the first number that is out of its bounds."""
    for key, value in numbers(config).items():
        bound = BOUNDS[key]
        if not bound.holds(value):
            expected = str(bound) if math.isfinite(value) else "a finite number"
            raise UserError(f"{value}", expected=expected, where=f"config.{key}", fix=f"Set config.{key}{bound.nearest(value)}")
