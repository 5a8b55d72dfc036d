"""One row as the model will read it, with its borders marked.

Shown before the first iteration, when a wrong template has cost nothing yet.
"""

from typing import Any

from jprm.train.phases import RLProgram, SupervisedProgram
from jprm.train.prompts import response_steps
from jprm.train.setup import Run

DIM, COLOURS, RESET = "\033[2m", ("\033[36m", "\033[33m"), "\033[0m"


def marked_example(run: Run, name: str, program: SupervisedProgram | RLProgram, *, colour: bool = False) -> str:
    """The first row of a phase's first iteration: ``[prompt]``, ``[response]``, and ``|`` where a step ends.

    Args:
      run: for the tokenizer and the separators.
      name: of the phase.
      program: its rows. RL has only prompts before it samples: the response is said to follow.
      colour: steps in alternating terminal colours, beside the marks.
    """
    batch = program.batches.batch(0, 1)
    tokens, length = batch.tokens[0], int(batch.lengths[0])
    front = length if isinstance(program, RLProgram) else int(batch.prompt_lengths[0])
    prompt = _text(run, tokens[:front])
    head = f"first row of {name}: [prompt] " + (f"{DIM}{prompt}{RESET}" if colour else prompt)
    if isinstance(program, RLProgram):
        return f"{head} [response] ... ({front} prompt tokens, then at most {run.config.sampling.max_new} sampled)"
    step = response_steps(run, tokens[front:length])
    pieces = [_text(run, tokens[front:length][step == k]) for k in range(int(step.max(initial=-1)) + 1)]
    if colour:
        pieces = [f"{COLOURS[k % 2]}{piece}{RESET}" for k, piece in enumerate(pieces)]
    return f"{head} [response] {'|'.join(pieces)} ({front} + {length - front} tokens, {len(pieces)} steps)"


def _text(run: Run, ids: Any) -> str:
    """Special tokens stay visible; line ends are spelled, so that the row stays one line."""
    return run.tokenizer.decode(ids, skip_special_tokens=False).replace("\n", "\\n")
