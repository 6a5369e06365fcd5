"""Tokenizers with chat templates, made here: byte-level BPE trained on a few lines, in the manner of well-known families."""

import json
from pathlib import Path
from typing import Any

LINES = [
    "user assistant system You are terse. What is 2+3? It is 5. And 4? 24 48 72 #### 72",
    "Reverse the word stone, then say why. enots is stone written backward.\n\n</answer> <answer>",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning is defined %}({{ message.reasoning }}) {% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# as Llama's and Mistral's: the template writes the bos, which the post-processor adds to any other text
BOS_NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# as Qwen3's: the reasoning of earlier turns goes when others follow
FORGETS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>hm</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# with the marks from which transformers tells what the assistant wrote
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# no special tokens between the turns
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tokenizer(
    path: Path,
    template: str | None = CHATML,
    *,
    eos: str | None = "<|im_end|>",
    bos: bool = False,
    generation: dict[str, Any] | None = None,
) -> Path:
    """A directory with a tokenizer without a padding token. bos: `<s>`, which a post-processor puts in front of any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    names: dict[str, Any] = {"eos_token": eos} if eos else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>" if bos else None, **names)
    fast.chat_template = template
    fast.save_pretrained(path)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def reference(path: Path) -> Any:
    """transformers' own tokenizer of the directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
