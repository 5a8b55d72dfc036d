"""From logits to a token: the distribution that is sampled from, and one draw of it."""

import dataclasses

import jax
import jax.numpy as jnp

from jprm.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are drawn (static under jit).

    Attributes:
      max_new: N, at most this many response tokens, stop token included.
      min_new: stop tokens have probability 0 before this many response tokens.
      temperature: logits are divided by it; 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches p (Holtzman et al., arXiv 1904.09751); 1 keeps all.
      stop_ids: token ids that end a response: the union of the tokenizer's and the generation config's.
    """

    max_new: int
    min_new: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        checks = (
            ("max_new", self.max_new >= 1, "at least 1 token"),
            ("min_new", 0 <= self.min_new <= self.max_new, f"between 0 and max_new={self.max_new}"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
        )
        for name, fine, expected in checks:
            if not fine:
                raise UserError(
                    f"{name}={getattr(self, name)}",
                    expected=expected,
                    where=f"config.sampling.{name}",
                    fix=f"Set config.sampling.{name} to a value that is {expected}",
                )


def log_distribution(logits_RxV: jax.Array, sampling: Sampling, stop_allowed: jax.Array | bool = True) -> jax.Array:
    """Normalised log-probabilities f32[R, V] of exactly the distribution :func:`draw` samples; -inf where cut off.

    Temperature first, then the ban on early stops, then top-k, then top-p. Tokens tied with the last kept one are kept.
    Greedy (temperature 0) puts all mass on the first most likely token: its log-probability is 0.
    """
    z = logits_RxV.astype(jnp.float32)
    if sampling.stop_ids and sampling.min_new:
        stop_V = jnp.zeros(z.shape[-1], bool).at[jnp.array(sampling.stop_ids)].set(True)
        z = jnp.where(stop_V & ~jnp.asarray(stop_allowed), -jnp.inf, z)
    if sampling.temperature == 0:
        best = jnp.argmax(z, axis=-1, keepdims=True)
        return jnp.where(jnp.arange(z.shape[-1]) == best, 0.0, -jnp.inf)
    z = z if sampling.temperature == 1 else z / sampling.temperature
    if 0 < sampling.top_k < z.shape[-1]:
        z = jnp.where(z >= jax.lax.top_k(z, sampling.top_k)[0][..., -1:], z, -jnp.inf)
    if sampling.top_p < 1:
        p = jnp.sort(jax.nn.softmax(z, axis=-1), axis=-1, descending=True)
        inside = jnp.cumsum(p, axis=-1) - p < sampling.top_p  # the mass before a token has not yet reached p
        least = jnp.min(jnp.where(inside, p, jnp.inf), axis=-1, keepdims=True)
        z = jnp.where(jax.nn.softmax(z, axis=-1) >= least, z, -jnp.inf)
    return jax.nn.log_softmax(z, axis=-1)


def draw(log_p_RxV: jax.Array, uniform_R: jax.Array, block: int = 256) -> jax.Array:
    """Inverse-CDF sampling: one uniform number per row chooses a token, i32[R].

    One random number per row instead of one per vocabulary entry: at V = 50,000 the Gumbel trick spends more on random bits
    than on the layer stack. Two levels (block, then token in it) keep the cumulative sums short and accurate.
    """
    R, V = log_p_RxV.shape
    p = jnp.pad(jnp.exp(log_p_RxV), ((0, 0), (0, -V % block))).reshape(R, -1, block)

    def choose(mass_RxC: jax.Array, target_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        cdf = jnp.cumsum(mass_RxC, axis=-1)
        last = (
            mass_RxC.shape[-1] - 1 - jnp.argmax(jnp.flip(mass_RxC > 0, axis=-1), axis=-1)
        )  # rounding must not reach a token of mass 0
        index = jnp.minimum(jnp.sum(cdf <= target_R[:, None], axis=-1), last)
        return index, target_R - jnp.take_along_axis(cdf - mass_RxC, index[:, None], axis=-1)[:, 0]

    mass = jnp.sum(p, axis=-1)
    b, rest = choose(mass, uniform_R * jnp.sum(mass, axis=-1))
    inside, _ = choose(jnp.take_along_axis(p, b[:, None, None], axis=1)[:, 0], rest)
    return (b * block + inside).astype(jnp.int32)


def row_keys(seed: jax.Array | int, iteration: jax.Array | int, rows: int, first: jax.Array | int = 0) -> jax.Array:
    """One typed key for each of the rows ``first``, ``first + 1``, …, folded from (seed, iteration, row).

    Noise then does not depend on batching or sharding.
    """
    key = jax.random.fold_in(jax.random.key(seed), iteration)
    return jax.vmap(lambda r: jax.random.fold_in(key, r))(first + jnp.arange(rows))
