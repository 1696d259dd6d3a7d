"""A small GPT-2 on a text of your own, the file book.txt of this folder; docs/own-data.md shows what it prints:

python examples/book.py
"""

from transformers import GPT2Config, GPT2LMHeadModel

import varuna_capslog as capslog
from varuna_capslog.own_data import TextFile, write_text


def model():
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 96, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def sample(model):
    return write_text(model, "A plan ", count=300, context=64)


if __name__ == "__main__":
    train = {
        "minibatch_size": 16,
        "microbatch_size": 4,
        "epochs": 1,
        "lr": 1e-3,
        "clip_norm": 1.0,
        "evaluate_every": 100,
    }
    settings = {"train": train, "profile.source": "estimated"}
    val = TextFile("book.txt", 64, part=(0.9, 1))
    run = capslog.train(model, TextFile("book.txt", 64, part=(0, 0.9)), settings, val=val, sample=sample)
    print(run)  # noqa: T201
    print(run.report())  # noqa: T201
