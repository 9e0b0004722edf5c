"""A language model of some hundred kilobytes for tests of a real engine: always the same.

It needs ``transformers`` and ``torch``, which come with vLLM. Nothing is downloaded. Run it as
``python -m batchjob_testkit.tiny_model FOLDER``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

# One line: each message is its text and a line break, and the answer follows.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a Llama model of two layers, its byte-level tokenizer and chat template to ``folder``.

    The weights follow from ``seed``. Returns ``folder``.
    """
    import torch
    import transformers

    tokenizer = _byte_tokenizer()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # Wider than usual, so that the next token is a clear choice and greedy texts are stable.
        initializer_range=0.4,
        dtype="bfloat16",
    )
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    """Write the model to the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(make_tiny_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
