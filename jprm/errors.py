"""What a user reads when something of theirs is wrong: four parts, always."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error a user can cause and mend.

    Args:
      found: what was there, with its value (``"7 rows"``, ``"path 'x' is a Git LFS pointer"``).
      expected: what would have been right (``"a multiple of mesh.data * mesh.fsdp = 4"``).
      where: config key, file:row or tensor name (``"config.rl.prompts"``, ``"train.jsonl:12"``).
      fix: the one thing to change, as an imperative sentence without its full stop.

    Example:
      >>> print(UserError("7 rows", expected="a multiple of 4", where="config.rl.prompts", fix="Set config.rl.prompts=8"))
      config.rl.prompts: found 7 rows; expected a multiple of 4. Set config.rl.prompts=8.
    """

    def __init__(self, found: str, *, expected: str, where: str, fix: str):
        self.found, self.expected, self.where, self.fix = found, expected, where, fix
        super().__init__(f"{where}: found {found}; expected {expected}. {fix}.")


def one_of(value: Any, allowed: Sequence[Any], *, where: str) -> None:
    """Refuses a value that is none of the allowed ones.

    Args:
      value: as it was given.
      allowed: the values there are; the first is what a config key may safely be set to.
      where: ``config.<key>``, or ``module.function.argument``; its last part names the value.

    Raises:
      UserError: the value is not allowed.
    """
    if value not in allowed:
        raise UserError(
            f"{where.rpartition('.')[2]} {value!r}",
            expected=f"one of {', '.join(map(str, allowed))}",
            where=where,
            fix=f"Set {where}={allowed[0]}" if where.startswith("config.") else "Name one of them",
        )
