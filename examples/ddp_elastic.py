"""Data-parallel training of a small network on CPUs, on members that come and go:

    capslog script --nproc 3 examples/ddp_elastic.py --steps 40

ddp_plain.py is the same training with plain torch.distributed.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from varuna_capslog.elastic.script import train

BLOCKS, BLOCK_SIZE = 12, 4  # sums are made in the order of blocks: the loss has the same bits for any number of ranks


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, number, group):
        parameters = list(self.model.parameters())
        sums = torch.zeros(BLOCKS, 1 + sum(parameter.numel() for parameter in parameters))
        for block in range(group.rank, BLOCKS, group.size):
            loss = self.loss(number, block)
            gradients = torch.autograd.grad(loss, parameters)
            sums[block] = torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)])
        group.all_reduce(sums)
        total = sums.sum(0) / BLOCKS
        pieces = total[1:].split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.optimizer.step()
        return total[0]

    def loss(self, number, block):
        random = torch.Generator().manual_seed(number * BLOCKS + block)
        inputs = torch.randn(BLOCK_SIZE, 16, generator=random)
        labels = inputs[:, :4].argmax(1)
        return F.cross_entropy(self.model(inputs), labels)


def show(number, loss):
    print(f"step {number}: loss {float(loss):.9f}", flush=True)  # noqa: T201


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()
training = Training()
train(training, options.steps, show)
