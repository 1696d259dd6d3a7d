"""A ResNet-18 on a folder of pictures, digits/<class>/<picture>.png; docs/own-data.md shows what it prints:

python examples/pictures.py
"""

import torchvision

import varuna_capslog as capslog
from varuna_capslog.own_data import ImageFolder


def model():
    return torchvision.models.resnet18(num_classes=10)


if __name__ == "__main__":
    train = {
        "minibatch_size": 32,
        "microbatch_size": 8,
        "epochs": 1,
        "lr": 1e-3,
        "clip_norm": 1.0,
        "evaluate_every": 25,
    }
    settings = {"train": train, "profile.source": "estimated"}
    val = ImageFolder("digits", size=32, part=(0.9, 1))
    data = ImageFolder("digits", size=32, part=(0, 0.9))
    run = capslog.train(model, data, settings, val=val, loss="cross_entropy", metric="accuracy", workers=1)
    print(run)  # noqa: T201
    print(run.report())  # noqa: T201
