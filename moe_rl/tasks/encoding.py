"""Problems to token ids: prompts as a model is asked, and examples as it is taught. With and without a chat template."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_rl.config_errors import near, show
from moe_rl.rollouts.config import RolloutSection
from moe_rl.task_config import TaskSection
from moe_rl.tasks.tokenizer import Tokenizer
from moe_rl.types import Message, Problem
from parallel.errors import UsageError

# what apply_chat_template itself takes, so that no template's variable can be called that
_NOT_OPTIONS = {
    *("conversation", "chat_template", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "sanitize_control_tokens",
}


@dataclass(frozen=True)
class Example:
    """A sequence to be taught. trained: for each token from `prompt` on (the tokens before the first one that is trained)
    whether it is a target."""

    ids: list[int]
    prompt: int
    trained: list[bool]


class Encoder:
    """One tokenizer under the chat settings of `task`.

    In a chat a problem's prompt is its conversation, or its text as the user's one turn, with task.system in front where it
    has no system turn; its ids are those of transformers' apply_chat_template. Otherwise a prompt is its text behind the
    tokenizer's own special tokens. Raises UsageError where the settings ask for a template that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Tokenizer, section: TaskSection, stop_ids: Iterable[int] = ()) -> None:
        """stop_ids: beside the tokenizer's."""
        self._tokenizer, self._section = tokenizer, section
        template = tokenizer.chat_template
        if section.chat is True and template is None:
            raise UsageError(f"task.chat=true: the tokenizer {tokenizer.name} has no chat template; set task.chat=false")
        self.is_chat = section.chat is not False and template is not None
        self._ends = tokenizer.stop_ids | set(stop_ids)
        self._end = tokenizer.eos_id if tokenizer.eos_id is not None else min(self._ends, default=None)
        self._check_settings(template or "")
        self.prefix = 0 if self.is_chat else len(tokenizer.encode_prompt(""))  # tokens in front of any prompt

    def _check_settings(self, template: str) -> None:
        section = self._section
        why = "task.chat=false" if section.chat is False else f"the tokenizer {self._tokenizer.name} has no chat template"
        for key, value in (("system", section.system), ("template_options", section.template_options or None)):
            if value is not None and not self.is_chat:
                raise UsageError(f"task.{key}={show(value)}: has no effect: {why}; remove it")
        names = set(re.findall(r"\w+", template))
        for option in section.template_options:
            if option in _NOT_OPTIONS:
                raise UsageError(f"task.template_options.{option}: is set here already; it holds variables of the template")
            if option not in names:
                raise UsageError(
                    f"task.template_options.{option}: the chat template of {self._tokenizer.name} has no such variable"
                    f"{near(option, names)}"
                )

    def notes(self) -> list[str]:
        """What a user may not expect, a line each."""
        name, notes = self._tokenizer.name, []
        if self.is_chat and self._section.chat == "auto":
            notes.append(
                f"prompts go through the chat template of the tokenizer {name}; task.chat=false leaves them as they are"
            )
        if not self._ends:
            notes.append(
                f"the tokenizer {name} has no end-of-sequence token: without rollout.stop_token_ids or rollout.stop a response "
                "takes all of rollout.max_response_tokens, and supervised answers have no end"
            )
        return notes

    def prompt(self, problem: Problem) -> list[int]:
        """The ids that ask `problem`."""
        if self.is_chat:
            return self._tokenizer.encode(self._render(self._conversation(problem), problem, generation=True))
        if problem.messages:
            why = "task.chat=false" if self._section.chat is False else f"{self._tokenizer.name} has no chat template"
            raise UsageError(
                f"{problem.id}: the prompt is a conversation, which needs a chat template, and {why}; set model.tokenizer to a "
                "tokenizer with one and task.chat=auto"
            )
        return self._tokenizer.encode_prompt(problem.prompt)

    def example(self, problem: Problem, train_on: Literal["last", "all"] = "last") -> Example:
        """The prompt with the answer behind it; targets are the answer and what ends it.

        In a chat the answer is the assistant's turn as the template writes it, up to and with the last stop id in it; the text
        of the answer and that id, where the template begins a turn to be generated otherwise than one of the data. With
        train_on "all" the earlier turns of the assistant are targets as well. Raises UsageError naming the problem where
        nothing is left to train, or where the template writes a turn otherwise once others follow.
        """
        if self.is_chat:
            example = self._chat_example(problem, train_on)
        else:
            prompt = self.prompt(problem)
            answer = self._finished(self._tokenizer.encode(problem.answer))
            example = Example(prompt + answer, len(prompt), [True] * len(answer))
        if not any(example.trained):
            raise UsageError(f"{problem.id}: its answer has no tokens, so there is nothing to train on")
        return example

    def _conversation(self, problem: Problem) -> list[Message]:
        messages: list[Message] = list(problem.messages) or [{"role": "user", "content": problem.prompt}]
        if self._section.system is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self._section.system})
        return messages

    def _render(self, messages: Sequence[Message], problem: Problem, *, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.render(messages, generation, self._section.template_options)
        except (TemplateError, TypeError, ValueError) as error:  # the last two: from an expression within the template
            roles = ", ".join(str(message.get("role")) for message in messages)
            hint = "; leave task.system out" if self._section.system is not None and "system" in str(error).lower() else ""
            raise UsageError(
                f"{problem.id}: the chat template of {self._tokenizer.name} refuses the conversation ({roles}): "
                f"{' '.join(str(error).split())[:200]}{hint}"
            ) from error

    def _chat_example(self, problem: Problem, train_on: str) -> Example:
        messages = self._conversation(problem)
        last = len(messages)
        messages.append(problem.reply or {"role": "assistant", "content": problem.answer})
        turns = [i for i, one in enumerate(messages) if one["role"] == "assistant" and (train_on == "all" or i == last)]
        # texts before and with each of those turns: each must begin the next
        edges = [
            text
            for i in turns
            for text in (
                self._render(messages[:i], problem, generation=True),
                self._render(messages[: i + 1], problem, generation=False),
            )
        ]
        if all(longer.startswith(shorter) for shorter, longer in zip(edges, edges[1:], strict=False)):
            return self._spans(edges)
        if len(turns) > 1:
            remedy = "set sft.train_on=last"
        elif extra := set(messages[last]) - {"role", "content"}:
            remedy = f"change the template, or leave {', '.join(sorted(extra))} out of the turn"
        else:
            return self._separate(edges[0], str(messages[last]["content"]), edges[1])
        raise UsageError(
            f"{problem.id}: the chat template of {self._tokenizer.name} writes a turn otherwise once its answer is there or "
            f"others follow, so that it cannot be told what to train; {remedy}"
        )

    def _separate(self, prompt: str, answer: str, whole: str) -> Example:
        """Where the template begins a turn to be generated otherwise than one of the data (an empty `<think></think>`): the
        answer's text behind what generation starts from, with the end that the template gives the turn."""
        encode = self._tokenizer.encode
        before, ids = encode(prompt), encode(answer)
        end = next((i for i in reversed(encode(whole)) if i in self._ends), self._end)
        ids += [] if end is None else [end]
        return Example(before + ids, len(before), [True] * len(ids))

    def _spans(self, edges: Sequence[str]) -> Example:
        """edges: texts that each begin the next, the end of a prompt and the end of an answer in turn.

        The ids are those of the whole text where each edge lies between two of its tokens. Where a token lies across one,
        the parts are encoded by themselves: then the prompt's ids are still those that generation starts from.
        """
        encode = self._tokenizer.encode
        ids = encode(edges[-1])
        pieces = [encode(edge) for edge in edges]
        if all(ids[: len(piece)] == piece for piece in pieces):
            cuts = [len(piece) for piece in pieces]
        else:
            ids, cuts = list(pieces[0]), [len(pieces[0])]
            for before, after in zip(edges, edges[1:], strict=False):
                ids += encode(after[len(before) :])
                cuts.append(len(ids))
        trained = [False] * len(ids)
        for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
            end = max((i + 1 for i in range(start, stop) if ids[i] in self._ends), default=stop)
            trained[start:end] = [True] * (end - start)
        if self._ends.intersection(ids[cuts[-2] :]):
            ids = ids[: _last(trained) + 1]  # what the template writes behind a turn
        else:
            ids = self._finished(ids)
            trained += [True] * (len(ids) - len(trained))
        first = trained.index(True) if any(trained) else len(ids)
        return Example(ids, first, trained[first : len(ids)])

    def _finished(self, ids: list[int]) -> list[int]:
        return ids if self._end is None else [*ids, self._end]


def _last(flags: Sequence[bool]) -> int:
    return max((i for i, flag in enumerate(flags) if flag), default=-1)


def check_stops(stops: Collection[str], tokenizer: Tokenizer) -> tuple[tuple[str, ...], frozenset[int]]:
    """rollout.stop as texts and, where one is a special token, its id. Raises UsageError where a special token is a part of
    one: it has no text, so that the whole would never be found."""
    ids = frozenset(tokenizer.special_tokens[stop] for stop in stops if stop in tokenizer.special_tokens)
    texts = tuple(stop for stop in stops if stop not in tokenizer.special_tokens)
    for stop in texts:
        for token in tokenizer.special_tokens:
            if token in stop:
                raise UsageError(
                    f"rollout.stop: {show(repr(stop))} holds the special token {token}, which has no text in a response; give "
                    "the token alone, or the rest"
                )
    return texts, ids


def build_encoder(tokenizer: Tokenizer, task: TaskSection, rollout: RolloutSection) -> Encoder:
    """Raises UsageError where the chat settings or the stop texts do not fit the tokenizer."""
    _, ids = check_stops(rollout.stop, tokenizer)
    return Encoder(tokenizer, task, {*rollout.stop_token_ids, *ids})
