"""What one round of sampling hands to the learner: rows, their groups, their response window and their steps."""

import jax
import jax.numpy as jnp
from flax import struct

from jprm.errors import UserError
from jprm.model.decode import Samples


@struct.dataclass
class Rollouts:
    """R = P prompts x G samples, prompt-major (the G samples of a prompt are neighbouring rows).

    Token arrays follow one convention: index t is about the token at position t. T is the whole sequence, or the response window
    of N tokens after :func:`to_window`; nothing in ``rl/`` assumes which.
    """

    tokens: jax.Array  # i32[R, T] prompt then response, right-padded
    lengths: jax.Array  # i32[R] prompt + response
    prompt_lengths: jax.Array  # i32[R]
    action: jax.Array  # bool[R, T] sampled by the policy, the sampled EOS included; prompt, tool output and padding are False
    step: jax.Array  # i32[R, T] reasoning step of a token, -1 outside
    turn: jax.Array  # i32[R, T] agent turn of a token, -1 outside
    behavior_logp: jax.Array  # f32[R, T] under the policy that sampled
    outcome: jax.Array  # f32[R] the verifier's verdict
    known: jax.Array  # bool[R] where the verifier could give one
    valid: jax.Array  # bool[R] False for filler rows: they enter no statistic
    columns: dict[str, jax.Array]  # what a method needs besides
    group: int = struct.field(pytree_node=False)  # G

    @property
    def token_mask(self) -> jax.Array:
        """bool[R, T] tokens that learn and are counted: sampled by the policy, in a valid row."""
        return self.action & self.valid[:, None]

    @property
    def labelled(self) -> jax.Array:
        """bool[R] rows whose outcome may enter a statistic: valid, known, and a finite number (a NaN reward is no verdict)."""
        return self.valid & self.known & jnp.isfinite(self.outcome)


# ------------------------------------------------------------------------------------------------ groups


def grouped(x: jax.Array, group: int) -> jax.Array:
    """View ``[R, ...]`` as ``[P, G, ...]``.

    Only for arrays without a token axis: where a group is spread over devices and P does not divide, this view moves data.

    Raises:
      UserError: R is not a multiple of the group size.
    """
    if group < 1 or x.shape[0] % group:
        raise UserError(
            f"{x.shape[0]} rows in groups of {group}",
            expected="rows = prompts x samples per prompt",
            where="rollouts.group",
            fix="Make the number of rows a multiple of the group size",
        )
    return x.reshape(x.shape[0] // group, group, *x.shape[1:])


# ------------------------------------------------------------------------------------------------ response window


def window(x_RxT: jax.Array, prompt_lengths: jax.Array, size: int, fill=0) -> jax.Array:
    """The response window ``[R, N]``: entry n is about the n-th response token, i.e. position ``prompt_length + n``.

    Args:
      x_RxT: any dtype [R, T].
      prompt_lengths: i32[R].
      size: N, static (max_new_tokens).
      fill: what stands where the window reaches beyond T.
    """
    positions = prompt_lengths[:, None] + jnp.arange(size)
    inside = positions < x_RxT.shape[1]
    taken = jnp.take_along_axis(x_RxT, jnp.where(inside, positions, 0), axis=1)
    return jnp.where(inside, taken, jnp.asarray(fill, x_RxT.dtype))


def to_window(rollouts: Rollouts, size: int) -> Rollouts:
    """The same rollouts with every token array cut to the response window ``[R, N]`` and prompts of length 0.

    A column counts as a token array when its first two dimensions are [R, T].
    """
    shape = rollouts.tokens.shape

    def cut(x, fill=0):
        return window(x, rollouts.prompt_lengths, size, fill)

    return rollouts.replace(
        tokens=cut(rollouts.tokens),
        lengths=jnp.minimum(rollouts.lengths - rollouts.prompt_lengths, size),
        prompt_lengths=jnp.zeros_like(rollouts.prompt_lengths),
        action=cut(rollouts.action, False),
        step=cut(rollouts.step, -1),
        turn=cut(rollouts.turn, -1),
        behavior_logp=cut(rollouts.behavior_logp),
        columns={k: cut(v) if v.shape == shape else v for k, v in rollouts.columns.items()},
    )


# ------------------------------------------------------------------------------------------------ steps


def step_ids(
    tokens_RxT: jax.Array,
    action_RxT: jax.Array,
    is_separator_V: jax.Array,
    max_steps: int,
    is_stop_V: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Number the reasoning steps of a response, on token ids (text is never re-tokenised to find a border).

    A step ends at a sampled token whose id is a separator; the separator belongs to the step it ends, so every separator makes a
    step, also one that follows another. A last token that stands alone after a separator (the EOS that closes the response) is no
    step of its own: it belongs to the step before. With ``is_stop_V`` that holds for stop ids only; without, for any single last
    token.

    Args:
      tokens_RxT: i32[R, T].
      action_RxT: bool[R, T] tokens sampled by the policy; separators elsewhere (tool output) end nothing.
      is_separator_V: bool[V] by token id.
      max_steps: S; steps S-1, S, S+1, ... merge into S-1.
      is_stop_V: bool[V] by token id, optional.

    Returns:
      ``(step i32[R, T], merged i32[R])``: -1 off the action mask; how many steps of a row the merge swallowed.

    Example: ids 9 = separator, 2 = EOS.
      >>> step_ids(jnp.array([[5, 9, 6, 7, 9, 2]]), jnp.ones((1, 6), bool), jnp.arange(10) == 9, 4)[0]
      Array([[0, 0, 1, 1, 1, 1]], dtype=int32)
    """
    ends = is_separator_V[tokens_RxT] & action_RxT
    step = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends  # borders strictly before the token
    rank = jnp.cumsum(action_RxT, axis=1, dtype=jnp.int32)
    last = action_RxT & (rank == rank[:, -1:])
    # with k borders before it, the last token is alone iff the border number k is the sampled token just before it
    border_rank = jnp.max(jnp.where(ends & ~last, rank, 0), axis=1, keepdims=True)
    alone = last & ~ends & (border_rank == rank - 1) & (rank > 1)
    if is_stop_V is not None:
        alone &= is_stop_V[tokens_RxT]
    step = jnp.where(action_RxT, step - alone, -1)
    merged = jnp.maximum(jnp.max(step, axis=1, initial=-1) - (max_steps - 1), 0)
    return jnp.minimum(step, max_steps - 1), merged


# ------------------------------------------------------------------------------------------------ from the sampler


def from_samples(
    samples: Samples,
    outcome: jax.Array,
    known: jax.Array,
    *,
    group: int,
    is_separator_V: jax.Array,
    max_steps: int,
    is_stop_V: jax.Array | None = None,
) -> Rollouts:
    """Responses of one turn and their verdicts as rollouts, every row ``valid``.

    Args:
      samples: R rows, prompt-major.
      outcome, known: f32[R], bool[R].
      group: G.
      is_separator_V, max_steps, is_stop_V: see :func:`step_ids`, whose ``merged`` is the column ``merged_steps``.
    """
    position = jnp.arange(samples.tokens.shape[1])
    action = (position >= samples.prompt_lengths[:, None]) & (position < samples.lengths[:, None])
    step, merged = step_ids(samples.tokens, action, is_separator_V, max_steps, is_stop_V)
    return Rollouts(
        tokens=samples.tokens,
        lengths=samples.lengths,
        prompt_lengths=samples.prompt_lengths,
        action=action,
        step=step,
        turn=jnp.where(action, 0, -1),
        behavior_logp=samples.logp,
        outcome=outcome,
        known=known,
        valid=jnp.ones(samples.lengths.shape, bool),
        columns={"merged_steps": merged},
        group=group,
    )
