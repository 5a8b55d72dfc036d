"""Held-out problems: sample, verify, score by the PRM; one dictionary of numbers and the rollouts behind it."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jprm.data.batches import PromptBatches, pad
from jprm.errors import UserError, one_of
from jprm.evals.first_error import chance_f1, f1, predict, tune_threshold
from jprm.evals.votes import best_of_n, majority_accuracy, pass_at_k
from jprm.model.decode import Samples
from jprm.model.sampling import Sampling
from jprm.model.spec import Params
from jprm.reward import implicit
from jprm.reward.scores import KINDS, NAMES, response_score, step_scores
from jprm.rl.learner import Learner
from jprm.rl.rollouts import Rollouts, to_window
from jprm.rl.step import Batch, response_logps
from jprm.sharding.rules import sharding
from jprm.tasks.task import Problem
from jprm.tasks.verifiers import extract_number
from jprm.train.prompts import place, replicated, responses
from jprm.train.rollout import device_verifier, fetch, make_sampler, to_rollouts, verify_on_host
from jprm.train.setup import Run
from jprm.train.state import TrainState

log = logging.getLogger(__name__)

EVAL_STREAM = 1_000_003  # folded into the seed: evaluation never draws the noise of training


@dataclasses.dataclass
class Scored:
    """Sampled responses to held-out problems, on the host, prompt-major [R] = P x G.

    step_scores, exists: f32/bool[R, S] and response_score f32[R]: by the PRM; None without one.
    """

    problems: list[Problem]
    group: int
    texts: list[str]
    outcome: np.ndarray
    known: np.ndarray
    rollouts: dict[str, np.ndarray]
    response_score: np.ndarray | None = None
    step_scores: np.ndarray | None = None
    exists: np.ndarray | None = None
    token_rewards: np.ndarray | None = None

    @property
    def correct(self) -> np.ndarray:
        """bool[P, G]; a response without a verdict is not correct."""
        return ((self.outcome > 0.5) & self.known).reshape(-1, self.group)


class Evaluator:
    """Compiles once per sampling mode and evaluates any state of the run.

    A problem set that is no multiple of the batch is filled up with its first problems; no statistic sees the filling.

    Raises:
      UserError: there is no held-out problem, or none that fits config.sampling.max_prompt; a score of an unknown name.
    """

    def __init__(self, run: Run):
        self.run = run
        one_of(run.config.eval.prm_score, NAMES, where="config.eval.prm_score")
        one_of(run.config.eval.first_error_score, KINDS, where="config.eval.first_error_score")
        one_of(run.config.eval.first_error_rows, ("demonstrations", "policy"), where="config.eval.first_error_rows")
        first = [run.task.eval[i] for i in range(min(run.config.eval.problems, len(run.task.eval)))]
        if not first:
            wanted = run.config.eval.problems > 0
            raise UserError(
                "no problem to evaluate on",
                expected="at least one",
                where="config.task.eval" if wanted else "config.eval.problems",
                fix="Set config.task.eval or config.task.split_by_hash, or config.eval.problems=0 to train without evaluation"
                if wanted
                else "Set config.eval.problems=200",
            )
        self._prompts = PromptBatches(first, run.builder, length=run.config.sampling.max_prompt, seed=0)
        self.problems = [first[i] for i in self._prompts.kept]
        self._programs: dict[Any, Callable] = {}
        self._score = jax.jit(self._prm_scores)

    def _prm_scores(self, prm: Params, reference: Params, rollouts: Rollouts) -> dict[str, jax.Array]:
        p, e = self.run.config.prm, self.run.config.eval
        rows = to_window(rollouts, self.run.config.sampling.max_new)
        batch = Batch(rollouts.tokens, rollouts.prompt_lengths, rows.tokens, rows.token_mask)
        q = implicit.log_ratio(
            response_logps(prm, self.run.cfg, batch)[0], response_logps(reference, self.run.cfg, batch)[0], batch.mask
        )
        scale = p.beta * p.score_scale
        steps, exists = step_scores(q, batch.mask, rows.step, p.max_steps, scale, e.first_error_score)
        score = response_score(q, batch.mask, rows.step, p.max_steps, scale, e.prm_score)
        return {
            "token_rewards": implicit.token_rewards(q, batch.mask, scale),
            "step_scores": steps,
            "exists": exists,
            "response_score": score,
        }

    def _program(self, sampling: Sampling, group: int) -> Callable:
        """One jitted call: sample, and verify where the task can on the device."""
        if (sampling, group) in self._programs:
            return self._programs[sampling, group]
        run, verifier = self.run, device_verifier(self.run)
        draw = make_sampler(run, sampling, group)

        def call(params, tokens, lengths, columns, seed, first_row):
            s = draw(params, tokens, lengths, seed, jnp.int32(0), first_row)
            if verifier is None:
                return s, None
            rows = {k: jnp.repeat(v, group, axis=0) for k, v in columns.items()}
            outcome, known = verifier(s.tokens, s.prompt_lengths, s.lengths, rows)
            return s, to_rollouts(run, s, outcome, known, group)

        self._programs[sampling, group] = jax.jit(call)
        return self._programs[sampling, group]

    def sample(self, state: TrainState, *, group: int, greedy: bool = False, with_prm: bool = False) -> Scored:
        """``group`` responses to every held-out problem, at the training temperature or greedily."""
        run, n = self.run, len(self.problems)
        sampling = dataclasses.replace(run.sampling, temperature=0.0) if greedy else run.sampling
        call = self._program(sampling, group)
        size = self._batch_size
        seed = replicated(run, jnp.uint32((run.config.seed + EVAL_STREAM) % 2**32))
        parts: list[dict[str, np.ndarray]] = []
        texts: list[str] = []
        for start in range(0, n, size):
            chosen = [self.problems[(start + i) % n] for i in range(size)]
            batch = place(run, self._prompts.of(chosen))
            # A row's noise belongs to its place among all held-out rows, so that it does not depend on how they are batched.
            first_row = replicated(run, jnp.int32(start * group))
            s, rollouts = call(state.policy.params, batch.tokens, batch.lengths, batch.columns, seed, first_row)
            if rollouts is None:
                rollouts = to_rollouts(run, *verify_on_host(run, batch, s, group), group)
            kept = {k: getattr(rollouts, k) for k in ("tokens", "prompt_lengths", "lengths", "step", "outcome", "known")}
            kept["stopped"] = rollouts.columns["stopped"]
            if with_prm:
                kept |= self._score(state.prm.params, state.reference, rollouts)
            kept = {k: fetch(v)[: (n - start) * group] for k, v in kept.items()}
            texts += responses(run, kept["tokens"], kept["prompt_lengths"], kept["lengths"])[0]
            parts.append(kept)
        whole = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        judged = {k: whole[k] for k in ("response_score", "step_scores", "exists", "token_rewards") if k in whole}
        return Scored(self.problems, group, texts, whole["outcome"], whole["known"], whole, **judged)

    def measure(self, state: TrainState, *, thorough: bool, judged: bool = True) -> tuple[dict[str, float], Scored]:
        """Metrics ``eval/…`` of a state and the samples behind them.

        ``accuracy`` is the mean over the first ``eval.samples`` responses per problem. ``thorough`` adds greedy, the k-sample
        statistics and, with a PRM and a task that knows the truth of steps, first-error F1. ``judged`` False leaves the PRM out.
        """
        e = self.run.config.eval
        k = max(e.pass_k, e.samples) if thorough else e.samples
        with_prm = judged and state.prm is not None and state.reference is not None
        s = self.sample(state, group=k, with_prm=with_prm)
        first = s.correct[:, : e.samples]
        lengths = (s.rollouts["lengths"] - s.rollouts["prompt_lengths"]).astype(float)
        m = {
            "accuracy": float(first.mean()),
            "accuracy_stderr": float(first.mean(axis=1).std() / np.sqrt(len(first))),
            "problems": float(len(first)),
            "unknown": float((~s.known).sum()),
            "response_length": float(lengths.mean()),
            "stopped": float(s.rollouts["stopped"].mean()),
        }
        if thorough:
            m["greedy"] = float(self.sample(state, group=1, greedy=True).correct.mean())
            if e.pass_k:
                m |= choices(s, e.pass_k)
        if with_prm and s.known.any():
            both = implicit.auc(*(jnp.asarray(x) for x in (s.response_score, s.outcome, s.known)))
            m["prm_auc"] = float(both[0] / both[1]) if float(both[1]) else float("nan")
            if thorough:
                m |= self.first_error(state, s)
                if e.rank_reference and e.pass_k:
                    r = self.sample(state.replace(policy=Learner(state.reference, ())), group=k, with_prm=True)
                    m |= {f"reference_{name}": value for name, value in choices(r, e.pass_k).items()}
        return {f"eval/{name}": value for name, value in m.items()}, s

    def first_error(self, state: TrainState, sampled: Scored) -> dict[str, float]:
        """First-error F1 on the rows that ``eval.first_error_rows`` names.

        Demonstrations of held-out problems are the same rows for every run of a task, whatever its policy has become, so that
        figures can be compared; those that do not fit the window are left out and counted in the log. The policy's own rows ask
        what its PRM still sees of the mistakes that it still makes.
        """
        run = self.run
        if run.config.eval.first_error_rows == "policy":
            truth, problem = first_errors(run, sampled), np.arange(len(sampled.texts)) // sampled.group
            return first_error_metrics(sampled.step_scores, sampled.exists, truth, problem)
        rows = [(i, p, text) for i, p in enumerate(self.problems) if (text := run.task.demonstration(p, 0)) is not None]
        truth = [run.task.first_error(p, text) for _, p, text in rows]
        if any(t is None for t in truth):
            return {}
        fits = [len(run.builder.encode(p.prompt, text)[0]) <= run.length for _, p, text in rows]
        if not all(fits):
            text = "demonstrations of held-out problems: %d of %d left out for more than %d tokens"
            log.info(text, fits.count(False), len(rows), run.length)
            rows, truth = ([x for x, fit in zip(xs, fits) if fit] for xs in (rows, truth))
        if not rows:
            return {}
        scored = [self._score_texts(state, [(p, text) for _, p, text in part]) for part in _parts(rows, self._batch_size)]
        steps, exists = (np.concatenate([x[k] for x in scored]) for k in ("step_scores", "exists"))
        return first_error_metrics(steps, exists, truth, np.array([i for i, *_ in rows]))

    @property
    def _batch_size(self) -> int:
        """Problems per call: rows of a batch must divide over the mesh."""
        size = min(self.run.config.eval.batch, len(self.problems))
        return -(-size // self.run.row_shards) * self.run.row_shards

    def _score_texts(self, state: TrainState, rows: list[tuple[Problem, str]]) -> dict[str, np.ndarray]:
        """PRM scores of given responses; a last batch that is not full is filled up with its first row."""
        run, n = self.run, len(rows)
        pairs = [run.builder.encode(p.prompt, text) for p, text in rows]
        pairs += pairs[:1] * (self._batch_size - n)
        tokens, lengths = pad([ids for ids, _ in pairs], run.length, run.tokenizer.pad_token_id, "config.sampling.max_new")
        where = sharding(run.mesh, ("rows",))
        place = lambda x: jax.device_put(np.asarray(x), where)
        s = Samples(
            tokens=place(tokens),
            prompt_lengths=place(np.array([front for _, front in pairs], np.int32)),
            lengths=place(lengths),
            logp=place(np.zeros(tokens.shape, np.float32)),
            stopped=place(np.ones(len(pairs), bool)),
        )
        outcome, known = place(np.zeros(len(pairs), np.float32)), place(np.ones(len(pairs), bool))
        rollouts = to_rollouts(run, s, outcome, known, group=1)
        return {k: fetch(v)[:n] for k, v in self._score(state.prm.params, state.reference, rollouts).items()}


def _parts(rows: list, size: int) -> list[list]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def choices(s: Scored, k: int) -> dict[str, float]:
    """pass@k, and what choosing one of the first k responses earns: by majority, and by the PRM where it has scored them."""
    numbers = [extract_number(t) for t in s.texts]
    answers = [numbers[i * s.group : i * s.group + k] for i in range(len(s.problems))]
    m = {f"pass_at_{k}": pass_at_k(s.correct, k), f"majority_at_{k}": majority_accuracy(answers, s.correct)}
    if s.response_score is not None:
        m[f"prm_best_of_{k}"] = best_of_n(s.response_score.reshape(-1, s.group)[:, :k], s.correct[:, :k])
    return m


def first_errors(run: Run, s: Scored) -> list[int | None]:
    """The truth of each response: 0-based first wrong step, -1 for none, None where the task does not know."""
    return [run.task.first_error(s.problems[r // s.group], text) for r, text in enumerate(s.texts)]


def first_error_metrics(scores: np.ndarray, exists: np.ndarray, truth: list[int | None], problem: np.ndarray) -> dict[str, float]:
    """ProcessBench F1 of step scores; the threshold comes from the even problems, the figure from the odd ones.

    Args:
      scores, exists: f32, bool[R, S].
      truth: [R] first wrong step, -1 for none; None where the task does not know: then there is no figure.
      problem: i64[R] number of each row's problem.
    """
    if any(t is None for t in truth):
        return {}
    label = np.minimum(np.array(truth), scores.shape[1] - 1)
    tune, test = problem % 2 == 0, problem % 2 == 1
    if not test.any() or not (label[tune] >= 0).any() or not (label[tune] < 0).any():
        return {}
    threshold = tune_threshold(scores[tune], exists[tune], label[tune])
    predicted = predict(scores[test], exists[test], threshold)
    return {
        "prm_first_error_f1": f1(predicted, label[test]),
        "prm_first_error_f1_chance": chance_f1(predicted, label[test], problem[test]),
        "prm_threshold": threshold,
    }
