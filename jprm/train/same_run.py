"""May this config go on with that checkpoint? The keys that may change, and the sentence for those that may not."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.errors import UserError

# These change how a run is watched, stored or laid out, or how long it lasts, but not what its iterations compute (the last line:
# up to the rounding of sums in another order).
FREE_KEYS = (
    *("workdir", "log", "checkpoint", "eval", "export", "rl.iterations"),
    *("mesh", "sft.micro_batch", "prm.micro_batch", "rl.micro_batch", "model.remat", "model.logits_chunk", "model.unroll"),
)
_log = logging.getLogger(__name__)


def check_same_run(stored: Mapping, current: Mapping, *, where: str, free: Sequence[str] = FREE_KEYS) -> list[str]:
    """Refuses to resume when a key that gives the numbers their meaning differs.

    Args:
      stored: the config in the checkpoint's meta.
      current: this run's resolved config (dict or ml_collections.ConfigDict).
      where: the workdir or checkpoint, for the message.
      free: dotted keys that may change, each with everything below it.

    Returns:
      The free keys that did change, as "key: old -> new"; they are logged as well.

    Raises:
      UserError: lists every other differing key, old -> new.
    """
    old, new = _flat(stored), _flat(current)
    changed = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
    only_one = sorted(old.keys() ^ new.keys())
    allowed = [key for key in changed if any(key == prefix or key.startswith(prefix + ".") for prefix in free)]
    refused = [key for key in changed if key not in allowed]

    def say(keys):
        return [f"{key}: {json.dumps(old[key])} -> {json.dumps(new[key])}" for key in keys]

    if refused:
        raise UserError(
            f"another config: {'; '.join(say(refused))}",
            expected="the config the run was started with",
            where=where,
            fix=f"Set config.{refused[0]}={json.dumps(old[refused[0]])}{' and the others' if len(refused) > 1 else ''} back, "
            "or name a new config.workdir",
        )
    if only_one:  # another version of the code: its defaults are what the run had
        _log.warning("config keys that only the %s config has: %s", where, ", ".join(k for k in only_one if k in old) or "none")
        _log.warning("config keys that %s does not know: %s", where, ", ".join(k for k in only_one if k in new) or "none")
    for line in say(allowed):
        _log.info("changed since %s was written: %s", where, line)
    return say(allowed)


def _flat(config: Any) -> dict[str, Any]:
    """Dotted keys to JSON values, so that a tuple equals the list it was stored as."""
    out: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            out[prefix] = json.loads(json.dumps(value, default=str))

    visit("", config)
    return out
