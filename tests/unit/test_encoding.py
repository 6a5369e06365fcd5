"""Prompts and examples: the ids of transformers' apply_chat_template, which tokens are trained, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from moe_rl.rollouts.config import RolloutSection
from moe_rl.task_config import TaskSection
from moe_rl.tasks import ByteTokenizer, Encoder, HFTokenizer, build_encoder, check_stops
from moe_rl.tasks.encoding import Example
from moe_rl.types import Problem
from parallel.errors import UsageError
from tests.chat_tokenizers import BOS_NO_SYSTEM, CHATML, FORGETS, PLAIN, reference, save_tokenizer

USER = {"role": "user", "content": "What is 2+3?"}
TALK = [
    {"role": "system", "content": "You are terse."},
    USER,
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 4?"},
]
FOUR = {"role": "assistant", "content": "24"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "chatml": save_tokenizer(root / "chatml", CHATML),
        "bos": save_tokenizer(root / "bos", BOS_NO_SYSTEM, eos="</s>", bos=True),
        "forgets": save_tokenizer(root / "forgets", FORGETS),
        "plain": save_tokenizer(root / "plain", PLAIN, eos="<|endoftext|>"),
        "endless": save_tokenizer(root / "endless", PLAIN, eos=None),
        "bare": save_tokenizer(root / "bare", None, eos="</s>", bos=True),
        "several": save_tokenizer(root / "several", CHATML, eos="<|endoftext|>", generation={"eos_token_id": [2, 0]}),
    }


def encoder(path: Path, **task: Any) -> Encoder:
    return Encoder(HFTokenizer(path), TaskSection.model_validate(task))


def trained_text(path: Path, example: Example) -> list[str]:
    """The runs of tokens that are trained, as text with special tokens."""
    flags = [False] * example.prompt + example.trained
    assert len(flags) == len(example.ids) and example.trained[0]
    runs: list[list[int]] = []
    for i, flag in enumerate(flags):
        if flag:
            runs += [[]] if not i or not flags[i - 1] else []
            runs[-1].append(example.ids[i])
    return [reference(path).decode(run) for run in runs]


@pytest.mark.parametrize("name", ["chatml", "forgets", "plain", "endless", "several"])
@pytest.mark.parametrize("messages", [[USER], TALK], ids=["one turn", "several"])
def test_a_conversation_has_the_ids_of_apply_chat_template(paths: dict[str, Path], name: str, messages: list[Any]) -> None:
    theirs = reference(paths[name]).apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encoder(paths[name]).prompt(Problem.of_messages("r", messages, "5")) == theirs
    assert len(theirs) > 5


def test_no_bos_is_doubled(paths: dict[str, Path]) -> None:
    tokenizer = reference(paths["bos"])
    theirs = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=True, return_dict=False)
    ours = encoder(paths["bos"]).prompt(Problem("r", str(USER["content"]), "5"))
    assert ours == theirs and ours.count(tokenizer.bos_token_id) == 1
    # without the chat the tokenizer itself puts one there
    plain = encoder(paths["bos"], chat=False).prompt(Problem("r", "What is 2+3?", "5"))
    assert plain == tokenizer("What is 2+3?")["input_ids"] and plain[0] == tokenizer.bos_token_id
    assert plain == encoder(paths["bare"]).prompt(Problem("r", "What is 2+3?", "5"))  # auto, and no template


def test_a_text_is_the_users_turn_and_the_system_turn_comes_where_there_is_none(paths: dict[str, Path]) -> None:
    apply = reference(paths["chatml"]).apply_chat_template
    options: dict[str, Any] = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    problem = Problem("r", "What is 2+3?", "5")
    system = {"role": "system", "content": "Count."}
    assert encoder(paths["chatml"]).prompt(problem) == apply([USER], **options)
    assert encoder(paths["chatml"], system="Count.").prompt(problem) == apply([system, USER], **options)
    talk = Problem.of_messages("r", TALK, "24")
    assert encoder(paths["chatml"], system="Count.").prompt(talk) == apply(TALK, **options)
    thinking = encoder(paths["chatml"], template_options={"enable_thinking": False}).prompt(problem)
    assert thinking == apply([USER], enable_thinking=False, **options) != apply([USER], **options)


def test_keys_beside_role_and_content_reach_the_template(paths: dict[str, Path]) -> None:
    messages = [USER, {"role": "assistant", "content": "5", "reasoning": "2 and 3"}, USER]
    ours = encoder(paths["chatml"]).prompt(Problem.of_messages("r", messages, "5"))
    assert "assistant\n(2 and 3) 5<|im_end|>" in reference(paths["chatml"]).decode(ours)


@pytest.mark.parametrize(
    ("name", "task", "text"),
    [
        ("bare", {"chat": True}, "task.chat=true: the tokenizer bare has no chat template"),
        ("bare", {"system": "s"}, "task.system=s: has no effect: the tokenizer bare has no chat template; remove it"),
        ("chatml", {"system": "s", "chat": False}, "task.system=s: has no effect: task.chat=false"),
        ("bare", {"template_options": {"a": 1}}, "task.template_options={'a': 1}: has no effect"),
        (
            "chatml",
            {"template_options": {"enable_thinkng": False}},
            "enable_thinkng: the chat template of chatml has no such variable; did you mean enable_thinking?",
        ),
        ("chatml", {"template_options": {"tokenize": False}}, "task.template_options.tokenize: is set here already"),
    ],
)
def test_settings_that_the_tokenizer_cannot_meet(paths: dict[str, Path], name: str, task: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        encoder(paths[name], **task)


def test_a_conversation_needs_a_template(paths: dict[str, Path]) -> None:
    talk = Problem.of_messages("f.jsonl:3", TALK, "24")
    for made, why in [
        (encoder(paths["bare"]), "bare has no chat template"),
        (encoder(paths["chatml"], chat=False), "task.chat=false"),
        (Encoder(ByteTokenizer(), TaskSection()), "bytes has no chat template"),
    ]:
        with pytest.raises(UsageError, match=f"f.jsonl:3: the prompt is a conversation, .* and {why}; set model.tokenizer"):
            made.prompt(talk)


def test_a_template_that_refuses_a_role_names_the_row(paths: dict[str, Path]) -> None:
    text = "f.jsonl:3: the chat template of bos refuses the conversation (system, user, assistant, user): System role not"
    with pytest.raises(UsageError, match=re.escape(text)) as caught:
        encoder(paths["bos"]).prompt(Problem.of_messages("f.jsonl:3", TALK, "24"))
    assert "\n" not in str(caught.value) and "task.system" not in str(caught.value)
    with pytest.raises(UsageError, match=r"f:1: .* \(system, user\): System role not supported; leave task.system out"):
        encoder(paths["bos"], system="Count.").prompt(Problem("f:1", "p", "a"))


def test_an_example_is_the_prompt_and_the_answer_up_to_its_end(paths: dict[str, Path]) -> None:
    tokenizer = reference(paths["chatml"])
    example = encoder(paths["chatml"]).example(Problem.of_messages("r", TALK, "24"))
    whole = tokenizer.apply_chat_template([*TALK, FOUR], tokenize=True, return_dict=False)
    newline = tokenizer.encode("\n")
    assert example.ids + newline == whole  # what the template writes behind the end is not trained
    assert example.ids[: example.prompt] == encoder(paths["chatml"]).prompt(Problem.of_messages("r", TALK, "24"))
    assert trained_text(paths["chatml"], example) == ["24<|im_end|>"]


def test_all_turns_of_the_assistant(paths: dict[str, Path]) -> None:
    talk = Problem.of_messages("r", TALK, "24")
    example = encoder(paths["chatml"]).example(talk, "all")
    assert example.ids == encoder(paths["chatml"]).example(talk).ids
    assert trained_text(paths["chatml"], example) == ["It is 5.<|im_end|>", "24<|im_end|>"]
    talk = Problem.of_messages("r", TALK[1:], "24")
    assert trained_text(paths["bos"], encoder(paths["bos"]).example(talk, "all")) == [" It is 5.</s>", " 24</s>"]


def test_the_turn_of_the_data_is_taught_as_it_is(paths: dict[str, Path]) -> None:
    problem = Problem.of_messages("r", [USER], "5", {"role": "assistant", "content": "5", "reasoning": "2 and 3"})
    assert trained_text(paths["chatml"], encoder(paths["chatml"]).example(problem)) == ["(2 and 3) 5<|im_end|>"]


def test_turns_without_an_end_of_their_own_get_one(paths: dict[str, Path]) -> None:
    problem = Problem("r", "What is 2+3?", "24")
    example = encoder(paths["plain"]).example(problem)
    assert trained_text(paths["plain"], example) == [" 24\n\n<|endoftext|>"]
    endless = encoder(paths["endless"])
    assert trained_text(paths["endless"], endless.example(problem)) == [" 24\n\n"]
    assert len(endless.notes()) == 2 and "has no end-of-sequence token" in endless.notes()[1]
    stopped = build_encoder(HFTokenizer(paths["endless"]), TaskSection(), RolloutSection(stop=["</s>"]))
    assert trained_text(paths["endless"], stopped.example(problem)) == [" 24\n\n</s>"]
    assert len(stopped.notes()) == 1


def test_a_token_across_the_edge_leaves_the_prompt_as_generation_has_it(paths: dict[str, Path]) -> None:
    """The prompt ends with a space, which the tokenizer would join with the answer."""
    path = save_tokenizer(paths["plain"].parent / "joins", PLAIN.replace("assistant:", "assistant: "))
    made = encoder(path)
    problem = Problem("r", "And 4?", "24")
    example, prompt = made.example(problem), made.prompt(problem)
    whole = reference(path).encode("user: And 4?\n\nassistant: 24\n\n")
    assert whole[: len(prompt)] != prompt  # so that this tests what it says
    assert example.ids[: len(prompt)] == prompt and example.prompt == len(prompt)
    assert trained_text(path, example) == ["24\n\n<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_can_train_the_last_alone(paths: dict[str, Path]) -> None:
    talk = Problem.of_messages("f:7", TALK, "24")
    assert trained_text(paths["forgets"], encoder(paths["forgets"]).example(talk)) == ["<think>hm</think>24<|im_end|>"]
    with pytest.raises(UsageError, match=r"f:7: the chat template of forgets writes .* others follow.*; set sft.train_on=last"):
        encoder(paths["forgets"]).example(talk, "all")


def test_a_turn_that_only_generation_begins_so(paths: dict[str, Path]) -> None:
    """The template opens a turn to be generated with <think></think>, which the turns of the data lack."""
    made = encoder(paths["chatml"], template_options={"enable_thinking": False})
    problem = Problem("f:7", "What is 2+3?", "<24")
    example = made.example(problem)
    assert example.ids[: example.prompt] == made.prompt(problem)
    assert reference(paths["chatml"]).decode(example.ids[: example.prompt]).endswith("assistant\n<think></think>")
    assert trained_text(paths["chatml"], example) == ["<24<|im_end|>"]
    reply = {"role": "assistant", "content": "5", "reasoning": "2 and 3"}
    with pytest.raises(UsageError, match=r"f:8: .*; change the template, or leave reasoning out of the turn"):
        made.example(Problem.of_messages("f:8", [USER], "5", reply))


def test_plain_examples(paths: dict[str, Path]) -> None:
    example = encoder(paths["bare"]).example(Problem("r", "What", "24"))
    tokenizer = reference(paths["bare"])
    assert example.ids == [*tokenizer("What")["input_ids"], *tokenizer.encode("24", add_special_tokens=False), 4]
    assert (example.prompt, example.trained) == (
        len(tokenizer("What")["input_ids"]),
        [True] * (len(example.ids) - example.prompt),
    )
    with pytest.raises(UsageError, match="r: its answer has no tokens, so there is nothing to train on"):
        encoder(paths["endless"], chat=False).example(Problem("r", "What", ""))


def test_stop_texts_that_are_special_tokens_are_ids(paths: dict[str, Path]) -> None:
    tokenizer = HFTokenizer(paths["several"])
    assert tokenizer.stop_ids == {0, 2}
    assert check_stops(["\n\n", "</s>"], tokenizer) == (("\n\n",), {4})
    with pytest.raises(UsageError, match=re.escape("rollout.stop: '</s>\\n' holds the special token </s>, which has no text")):
        check_stops(["</s>\n"], tokenizer)
