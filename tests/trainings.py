"""Small trainings for the tests of what is pruned after training: one to do in one's head, and a real one."""

import torch
from torch import nn

from prospr.masks.enforce import rezero

# A training one can do in one's head: step s adds (s + 1) times these numbers to the weights, 1 to the bias and 1 to a
# statistic. Ten steps are the whole schedule: 1 + 2 + ... + 10 = 55.
RATES = torch.tensor([[1.0, -2.0, 0.5, 0.25, -3.0, 0.125, 4.0, 0.0]])
START = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.register_buffer("steps_seen", torch.zeros(1))
        with torch.no_grad():
            self.line.weight.copy_(START)
            self.line.bias.zero_()


class Adding:
    """The training above; it keeps the calls made of it, and what the model was at each."""

    def __init__(self):
        self.calls = []
        self.seen = []

    def __call__(self, model, start, stop):
        self.calls.append((start, stop))
        self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
        with torch.no_grad():
            for step in range(start, 10 if stop is None else stop):
                model.line.weight.add_(RATES, alpha=step + 1)
                model.line.bias += 1
                model.steps_seen += 1
                rezero(model)


def small_net():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        nn.init.uniform_(net[4].weight, -0.5, 0.5)  # as large as the first layer's: neither empties
        return net


class Real:
    """SGD on noise from torch's global random state, with dropout; may be killed at its n-th call, half way."""

    def __init__(self, killed_at=None):
        self.calls = []
        self.killed_at = killed_at

    def __call__(self, model, start, stop):
        self.calls.append((start, stop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        stop = 8 if stop is None else stop
        for step in range(start, stop):
            if len(self.calls) == self.killed_at and step == (start + stop) // 2:
                raise KeyboardInterrupt
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()


def assert_same(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert list(first) == list(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name
