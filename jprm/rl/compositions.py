"""The published estimators as lists of channels, and the one function the training step calls.

=============  ==========================================================================================
GRPO           outcome > norm(mean, std)
Dr.GRPO        outcome > norm(mean)
RLOO           outcome > norm(leave-one-out)
PRIME          outcome > norm(leave-one-out) [> end > suffix sum]  +
               log-ratio rewards [> steps] > scale > norm(leave-one-row-out of row means) > suffix sum;  > whiten
=============  ==========================================================================================
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jprm.errors import UserError, one_of
from jprm.rl.credit import suffix_sum, value_baseline
from jprm.rl.normalise import max_return, norm, rms, scale_to
from jprm.rl.normalise import whiten as whiten_op
from jprm.rl.rollouts import Rollouts
from jprm.rl.select import has_contrast, to_rows
from jprm.rl.signal import Channel, Op, Signal, advantage, channel, column, keep, lift, signal, to_steps

OUTCOME_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
FORMULAS = ("paper", "prime_code")
CREDITS = ("reward", "baseline")
GRANULARITIES = ("token", "step")
PROCESS_SCALES = ("max_return", "rms", "none")

TOKEN_REWARDS = "token_rewards"  # the columns the step's arrays travel in
KL_REWARDS = "kl_rewards"

Advantage = Callable[..., tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]]


def contrasted(rollouts: Rollouts) -> jax.Array:
    """bool[R]: rows of groups whose outcomes differ."""
    return to_rows(has_contrast(rollouts.outcome, rollouts.labelled, rollouts.group), rollouts.group)


def outcome_and_kl(rollouts: Rollouts) -> Signal:
    """The verdict plus, where KL is part of the reward, the row's KL rewards: before the baseline, as in verl and TRL."""
    value = rollouts.outcome
    if KL_REWARDS in rollouts.columns:
        per_token = rollouts.columns[KL_REWARDS]
        value = value + jnp.sum(jnp.where(rollouts.token_mask, per_token, 0.0), axis=1)
    return signal(value, rollouts.labelled, "row")


# ------------------------------------------------------------------------------------------------ channels


def outcome_channel(estimator: str = "grpo", *, weight=1.0, gamma: float = 1.0, ddof: int = 1, eps: float = 1e-6) -> Channel:
    """The outcome against its group.

    Args:
      estimator: ``grpo``: (o - mean) / (std + eps); ``dr_grpo``: o - mean; ``rloo``: o - mean of the others.
      weight: of the channel in the sum.
      gamma: below 1 the outcome is paid on the last token and discounted backwards over tokens.
      ddof, eps: of GRPO's std. TRL has eps 1e-4, verl 1e-6.

    References:
      Shao et al. 2402.03300 (GRPO); Liu et al. 2503.20783 (Dr.GRPO); Ahmadian et al. 2402.14740 (RLOO).
    """
    one_of(estimator, OUTCOME_ESTIMATORS, where="config.rl.estimator")
    ops: list[Op] = [
        norm("group", "loo" if estimator == "rloo" else "mean", "std" if estimator == "grpo" else "none", ddof=ddof, eps=eps)
    ]
    if gamma != 1.0:
        ops += [lift("end"), suffix_sum(gamma)]
    return channel("outcome", outcome_and_kl, *ops, weight=weight)


def process_channel(
    *,
    credit: str = "reward",
    formula: str = "paper",
    granularity: str = "token",
    accumulate: bool = True,
    gamma: float = 1.0,
    scale: str = "max_return",
    scale_floor: float = 0.0,
    scale_target: float | Channel = 1.0,
    contrast_only: bool = False,
    max_steps: int | None = None,
    weight=1.0,
) -> Channel:
    r"""Token rewards (the column ``token_rewards``) as PRIME credits them.

    .. math::  A_t = \sum_{s \ge t} \gamma^{s-t}\Big[\tilde r_s - \tfrac{1}{K-1}\sum_{j\ne i}\bar r_j\Big]

    Args:
      credit: ``reward`` as above, PRIME's; ``baseline`` uses the same rewards as a critic instead, see
        :func:`jprm.rl.credit.value_baseline`, and reads only ``granularity``, ``contrast_only`` and ``max_steps``.
      formula: ``paper`` as above; ``prime_code`` as the authors' code and verl-recipe compute the bracket, see
        :func:`jprm.rl.normalise.norm` (the two agree at the first token and differ by a zero-sum reshaping after it).
      granularity: ``step`` sums rewards over each step first; baseline, discount and credit then count steps.
      accumulate: False leaves out the suffix sum. r_t = Q_t - Q_{t-1} is already a difference of values, i.e. an advantage.
      gamma: discount per token (step).
      scale: ``max_return`` divides rewards as PRIME's code does; ``rms`` scales the finished returns to ``scale_target``;
        ``none``.
      scale_floor: least divisor, in units of the token rewards; see :func:`jprm.rl.normalise.scale_to`.
      scale_target: for ``rms``: a number or a channel to match.
      contrast_only: groups whose outcomes are all equal get no process credit (they have no say in which process is right).
      max_steps: S, needed for ``step``.
      weight: of the channel in the sum.

    References:
      Cui et al., PRIME (arXiv 2502.01456), and its code's RLOO estimator.
    """
    one_of(credit, CREDITS, where="config.rl.process_credit")
    one_of(formula, FORMULAS, where="config.rl.formula")
    one_of(granularity, GRANULARITIES, where="config.rl.granularity")
    one_of(scale, PROCESS_SCALES, where="config.rl.process_scale")
    if granularity == "step" and not max_steps:
        raise UserError(
            f"max_steps={max_steps!r}",
            expected="a positive number of steps with granularity 'step'",
            where="config.rl.max_steps",
            fix="Set config.rl.max_steps",
        )
    ops: list[Op] = []
    if contrast_only:
        ops.append(keep(contrasted))
    if granularity == "step":
        ops.append(to_steps(max_steps))
    if credit == "baseline":
        ops += [keep(lambda rollouts: rollouts.labelled), value_baseline()]
        return channel("process", column(TOKEN_REWARDS, "token"), *ops, weight=weight)
    if scale == "max_return":
        ops.append(scale_to("max_return", floor=scale_floor))
    ops.append(norm("group", "loo_rows" if formula == "paper" else "loo_rows_code", "none"))
    if accumulate:
        ops.append(suffix_sum(gamma))
    if scale == "rms":
        ops += [lift("all"), scale_to("rms", floor=scale_floor, target=scale_target)]
    return channel("process", column(TOKEN_REWARDS, "token"), *ops, weight=weight)


# ------------------------------------------------------------------------------------------------ what the step calls


def build_advantage(
    *,
    estimator: str = "rloo",
    outcome_weight=1.0,
    outcome_gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
    process_weight=0.0,
    process_credit: str = "reward",
    process_gamma: float = 1.0,
    formula: str = "paper",
    granularity: str = "token",
    accumulate: bool = True,
    process_scale: str = "max_return",
    scale_floor: float = 0.0,
    contrast_only: bool = False,
    max_steps: int | None = None,
    whiten: bool = False,
) -> Advantage:
    """The advantage of a run from plain numbers and strings.

    Args: those of :func:`outcome_channel` and :func:`process_channel`, and
      process_weight: a static 0 leaves the process channel out (outcome-only GRPO, Dr.GRPO, RLOO).
      process_scale: ``rms`` matches the outcome channel's rms; then ``process_weight`` is the ratio of the two.
      whiten: mean 0 and variance 1 over all counted tokens of the batch at the end (PRIME: True). Tokens without any credit
        (unknown outcomes, groups without contrast) are counted too and get minus the mean; make their rows not ``valid`` to
        leave them out.

    Returns:
      ``f(rollouts, token_rewards=None, kl_rewards=None) -> (advantages f32[R, T], returns, metrics)``: pure, to be jitted with
      the step; all gradients stopped. ``token_rewards`` and ``kl_rewards`` (from :func:`jprm.rl.kl.kl_rewards`) are f32[R, T] of
      the same window as the rollouts' token arrays. ``returns`` holds the unweighted token signal of each source, ``outcome`` and
      ``process``. ``metrics`` are f32 scalars of the whole batch.

    Raises:
      UserError: unknown strings; ``step`` without ``max_steps``.

    Example: PRIME as its authors run it.
      >>> f = build_advantage(estimator="rloo", process_weight=1.0, formula="prime_code", whiten=True)
    """
    out = outcome_channel(estimator, weight=outcome_weight, gamma=outcome_gamma, ddof=ddof, eps=eps)
    with_process = not (isinstance(process_weight, (int, float)) and process_weight == 0)
    process = process_channel(
        credit=process_credit,
        formula=formula,
        granularity=granularity,
        accumulate=accumulate,
        gamma=process_gamma,
        scale=process_scale,
        scale_floor=scale_floor,
        scale_target=out,
        contrast_only=contrast_only,
        max_steps=max_steps,
        weight=process_weight,
    )
    compute = advantage([out, process] if with_process else [out], [whiten_op()] if whiten else [])

    def f(rollouts: Rollouts, token_rewards: jax.Array | None = None, kl_rewards: jax.Array | None = None):
        columns = dict(rollouts.columns)
        if with_process:
            if token_rewards is None:
                raise UserError(
                    "no token rewards",
                    expected="rewards of a process reward model",
                    where="config.rl.process_weight",
                    fix="Set config.rl.process_weight=0 or train a PRM",
                )
            columns[TOKEN_REWARDS] = token_rewards
        if kl_rewards is not None:
            columns[KL_REWARDS] = kl_rewards
        rollouts = rollouts.replace(columns=columns)
        advantages, returns = compute(rollouts)
        return advantages, returns, jax.lax.stop_gradient(_metrics(rollouts, advantages, returns, granularity, max_steps))

    return f


def _metrics(rollouts, advantages, returns, granularity, max_steps):
    mask = rollouts.token_mask
    labelled = rollouts.labelled.astype(jnp.float32)
    groups = rollouts.outcome.shape[0] // rollouts.group
    contrast = jnp.sum(has_contrast(rollouts.outcome, rollouts.labelled, rollouts.group), dtype=jnp.float32)
    big = jnp.finfo(jnp.float32).max
    some = jnp.any(mask)
    metrics = {
        "critic/score/mean": jnp.sum(jnp.where(rollouts.labelled, rollouts.outcome, 0.0)) / jnp.maximum(jnp.sum(labelled), 1.0),
        "critic/labelled": jnp.sum(labelled),
        "critic/unlabelled": jnp.sum(rollouts.valid & ~rollouts.labelled, dtype=jnp.float32),
        "critic/contrast_groups": contrast / max(groups, 1),
        "critic/advantages/rms": rms(signal(advantages, mask, "token")),
        "critic/advantages/max": jnp.where(some, jnp.max(jnp.where(mask, advantages, -big), initial=-big), 0.0),
        "critic/advantages/min": jnp.where(some, jnp.min(jnp.where(mask, advantages, big), initial=big), 0.0),
    }
    for name, value in returns.items():
        metrics[f"critic/{name}_return_rms"] = rms(signal(value, mask, "token"))
    if "process" in returns:
        rewards = column(TOKEN_REWARDS, "token")(rollouts)
        if granularity == "step":
            rewards = to_steps(max_steps)(rewards, rollouts)
        metrics["prm/max_return"] = max_return(rewards)
        metrics["prm/reward_rms"] = rms(rewards)
    return metrics
