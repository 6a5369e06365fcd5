"""pass@1, pass@k, rewards and lengths on held-out problems."""

from collections.abc import Callable, Sequence

from moe_rl import evaluation_files as files
from moe_rl import notes, weights
from moe_rl.config import RunConfig
from moe_rl.estimates import Outcome, Stopped, Tally
from moe_rl.rollouts.collect import Batch, collect
from moe_rl.session import Session, opened
from moe_rl.stopwatch import Stopwatch
from moe_rl.types import Problem, Response

# What is done with the responses to some problems, once they are there: it also sees what was added up so far
_EachPart = Callable[[Batch, Sequence[Outcome], Tally], None]


def evaluate_policy(session: Session, problems: Sequence[Problem] | None = None) -> dict[str, float]:
    """`eval/...` of the present weights (collective). The problems and the seeds are the same at every call.

    problems: those held out, where none are given; the first eval.problems of them.
    """
    watch = Stopwatch(session.progress)
    problems = (session.task.heldout if problems is None else problems)[: session.config.eval.problems]
    return _answer(session, problems, watch).metrics() | {"time/eval_seconds": sum(watch.seconds.values())}


def _answer(session: Session, problems: Sequence[Problem], watch: Stopwatch, each: _EachPart | None = None) -> Tally:
    """Has every problem answered and scored, some problems at a time: of many responses not all are held at once.

    Which ones go together changes no response: the seed of each is that of its problem's place and its own number.
    """
    section, sampling = session.config.eval, session.sampling(session.config.eval.temperature)
    together = max(1, session.config.rollout.max_batch * session.groups.data.size // section.samples)
    tally = Tally(section.samples, section.ks)
    for first in range(0, len(problems), together):
        part = problems[first : first + together]
        start = first * section.samples
        batch = collect(session, part, section.samples, sampling, "eval", 0, watch, first=start)
        outcomes = [
            Outcome(score.value, score.correct, len(r.response.token_ids), _stopped(r.response, session), score.failed)
            for r, score in zip(batch.rollouts, batch.scores, strict=True)
        ]
        for i in range(0, len(outcomes), section.samples):
            tally.add(outcomes[i : i + section.samples])
        if each is not None:
            each(batch, outcomes, tally)
    return tally


def _stopped(response: Response, session: Session) -> Stopped:
    if response.finish_reason == "length":
        return "length"
    return "eos" if response.token_ids[-1] in session.tokenizer.stop_ids else "stop"


def evaluate(config: RunConfig) -> None:
    """The command `moe-rl eval`. All that it writes is in RUN/eval, so that a run that is evaluated stays as it is."""
    source = weights.evaluated(config)
    with opened(config, {}, evaluates=True) as session:
        weights.load(source, session.model)
        problems = session.task.heldout[: config.eval.problems]
        watch, tracker = Stopwatch(session.progress), session.tracker
        if tracker is None:
            _answer(session, problems, watch)
            return
        if note := notes.repeated_samples_note(config.eval):
            tracker.print(f"note: {note}")
        with files.EvaluationFiles(tracker.directory, files.name_of(source, config)) as output:

            def each(batch: Batch, outcomes: Sequence[Outcome], tally: Tally) -> None:
                output.add(batch.rollouts, outcomes, config.eval.samples)
                speed = {"time/rollout_tokens_per_second": tally.tokens / watch.seconds["rollout"]}
                tracker.progress("eval", tally.problems, len(problems), tally.metrics() | speed)

            estimates = _answer(session, problems, watch, each).estimates()
            evaluated = files.Evaluated(source, len(problems), len(session.task.heldout))
            output.finish(files.figures(config, evaluated, estimates, sum(watch.seconds.values())))
        tracker.print(files.table(config, evaluated, estimates))
        tracker.print(f"figures: {output.figures}\nresponses: {output.responses}")
