"""The step that a GPU replays: uncaptured on the CPU, beside the eager trainer; on a GPU, captured and not."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import prospr
from prospr.lab.data import Batches, CropFlip, Split, digits
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.tasks import segmentation
from prospr.lab.train import train, train_together, uses_graph
from prospr.lab.training import CaptureError, EagerTrainer, GraphTrainer, Run, graph
from prospr.lab.training.aligned import AlignedConv2d
from prospr.lab.training.flat import ALIGN, Flat
from prospr.lab.training.numerics import Numerics
from prospr.lab.training.store import Store, upload

MOVED = CropFlip(pad=1, flip=True)
PLAIN = Recipe(epochs=2, batch_size=96, lr=0.05, precision="float32", channels_last=False)
RECIPES = {
    "plain": replace(PLAIN, momentum=0.0, weight_decay=0.0),
    "momentum and decay": PLAIN,
    "nesterov": replace(PLAIN, nesterov=True),
    "drop": replace(PLAIN, drops=(1,)),
    "warm-up": replace(PLAIN, warmup=1),
    "cosine, channels last": replace(PLAIN, schedule="cosine", channels_last=True),
}


@pytest.fixture(scope="module")
def data():
    """Bytes: 400 digits, so that the last batch of an epoch is short."""
    found = digits()
    values = [((part.images - part.images.min()) * 40).byte() for part in (found.train, found.test)]
    mean, std = torch.tensor([77.0]), torch.tensor([94.0])
    train = Split(values[0][::3][:400].contiguous(), found.train.labels[::3][:400].contiguous(), mean, std)
    return train, Split(values[1], found.test.labels, mean, std)


def make_run(data, seed=0, recipe=PLAIN, masked=False, augment=MOVED, device="cpu", network=None):
    train = data[0].to(device)
    batches = Batches(train.images, train.labels, recipe.batch_size, seed, augment, mean=train.mean, std=train.std)
    model = (network() if network else build("small_convnet", seed=seed, width=4)).to(device)
    masks = None
    if masked:
        masks = {n: (torch.arange(p.numel(), device=device) % 3 > 0).view(p.shape)
                 for n, p in model.named_parameters() if p.dim() > 1}  # fmt: skip
    return Run(model, batches, recipe, masks)


def spread(first, second):
    """The largest difference between two models, in weights and in statistics."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def in_double(run):
    batches = Batches(
        (run.batches.images.double() - 77) / 94, run.batches.labels, run.recipe.batch_size, 0, run.batches.augment
    )
    return replace(run, model=run.model.double(), batches=batches)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_step_is_the_eager_one(data, name, masked):
    """In float64 over two epochs, where what differs in rounding has no time to grow."""
    eager, fast = (in_double(make_run(data, recipe=RECIPES[name], masked=masked)) for _ in range(2))
    before = {n: p.detach().clone() for n, p in fast.model.named_parameters()}
    (expected,) = EagerTrainer(eager).train()
    (got,) = GraphTrainer([fast]).train()
    assert spread(eager.model, fast.model) < 1e-11
    assert max((p - before[n]).abs().max() for n, p in fast.model.named_parameters()) > 1e-3
    assert got.train_losses == pytest.approx(expected.train_losses, abs=1e-10)
    assert [e.train for e in got.epochs] == [e.train for e in expected.epochs]
    assert [e.lr for e in got.epochs] == [e.lr for e in expected.epochs]
    for name, keep in (fast.masks or {}).items():
        assert (fast.model.get_parameter(name)[~keep] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_the_step_is_the_eager_one_in_float32(data, masked):
    eager, fast = (make_run(data, recipe=RECIPES["nesterov"], masked=masked) for _ in range(2))
    one, other = EagerTrainer(eager), GraphTrainer([fast])
    for trainer in (one, other):
        trainer.train_steps(4)
        trainer.write_back()
    assert spread(eager.model, fast.model) < 1e-6


def test_bfloat16_is_what_autocast_computes(data):
    recipe = replace(PLAIN, precision="bf16", channels_last=True)
    eager, fast = (make_run(data, recipe=recipe, masked=True) for _ in range(2))
    (expected,) = EagerTrainer(eager).train()
    (got,) = GraphTrainer([fast]).train()
    assert got.train_losses == pytest.approx(expected.train_losses, rel=5e-3)
    exact = make_run(data, masked=True)
    EagerTrainer(exact).train()
    assert spread(eager.model, fast.model) < 0.3 * spread(eager.model, exact.model)
    assert {p.dtype for p in fast.model.parameters()} == {torch.float32}
    assert fast.model.conv2.weight.is_contiguous()  # the given model keeps its layout


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_masks_that_are_on_the_model_hold(data, precision):
    recipe = replace(PLAIN, precision=precision)
    given, applied = (make_run(data, recipe=recipe) for _ in range(2))
    masks = prospr.Masks(make_run(data, masked=True).masks)
    masks.apply(applied.model)
    GraphTrainer([replace(given, masks=masks)]).train()
    GraphTrainer([applied]).train()
    masks.remove(applied.model)
    assert spread(given.model, applied.model) == 0
    assert all((applied.model.get_parameter(name)[~keep] == 0).all() for name, keep in masks.items())


def test_runs_in_company_are_runs_alone(data):
    def runs():
        other = replace(PLAIN, lr=0.02, nesterov=True)
        wide = lambda: build("small_convnet", seed=5, width=6)  # noqa: E731
        return [make_run(data), make_run(data, 1, other, masked=True), make_run(data, 1, network=wide)]

    company = runs()
    trainer = GraphTrainer(company)
    together = trainer.train(data[1])
    assert len({id(lane.store) for lane in trainer._lanes}) == 1  # the images are there once
    for run, result, same in zip(runs(), together, company, strict=True):
        (alone,) = GraphTrainer([run]).train(data[1])
        assert alone.test == result.test
        assert alone.train_losses == result.train_losses
        assert spread(run.model, same.model) == 0


@pytest.mark.parametrize("stop", [(1, 0), (1, 2)])
def test_a_state_of_one_trainer_resumes_in_another(data, stop):
    whole = make_run(data, masked=True)
    (expected,) = GraphTrainer([whole]).train(data[1])
    broken = GraphTrainer([make_run(data, masked=True)])
    for _ in range(stop[0]):
        broken.train_epoch()
    broken.train_steps(stop[1])
    states = broken.states()
    for trainer, tolerance in ((GraphTrainer, 0), (lambda runs: EagerTrainer(*runs), 1e-5)):
        resumed = make_run(data, masked=True)
        again = trainer([resumed])
        again.load_states(states)
        (got,) = again.train(data[1])
        assert spread(whole.model, resumed.model) <= tolerance
        assert got.train_losses == pytest.approx(expected.train_losses, rel=tolerance, abs=0)
        assert len(got.epochs) == 2


def test_looking_at_other_data_changes_nothing(data):
    quiet, watched = make_run(data), make_run(data)
    GraphTrainer([quiet]).train(data[1])
    (result,) = GraphTrainer([watched]).train(data[1], validation=data[1], evaluate_every=1)
    assert spread(quiet.model, watched.model) == 0
    assert [e.test for e in result.epochs] == [e.validation for e in result.epochs]


@pytest.mark.parametrize("augment", [None, MOVED])
def test_segmentation(data, augment):
    task, recipe = segmentation(2), replace(PLAIN, lr=0.1)
    images, labels = data[0].images, (data[0].images[:, 0] > 77).long()
    scale = {"mean": data[0].mean, "std": data[0].std}
    batches = Batches(images, labels, recipe.batch_size, 0, augment, drop_last=True, **scale)

    def make():
        torch.manual_seed(0)
        return Run(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), batches, recipe, None, task
        )

    eager, fast = make(), make()
    (expected,) = EagerTrainer(eager).train()
    (got,) = GraphTrainer([fast]).train(Split(images, labels, **scale))
    assert spread(eager.model, fast.model) < 1e-6
    assert [epoch.train for epoch in got.epochs] == pytest.approx([epoch.train for epoch in expected.epochs])


def test_the_store_makes_the_batches_of_an_epoch(data):
    for augment in (CropFlip(pad=2, flip=True), None):
        batches = make_run(data, augment=augment).batches
        store, drawn = Store(batches, torch.device("cpu")), upload(batches, 3)
        assert drawn.shape == (5, 4, 96)
        numerics = Numerics.of(PLAIN, torch.device("cpu"))
        for step, (images, labels) in enumerate(batches.epoch(3)):
            mine, targets = store.batch(drawn[step][:, : len(labels)], torch.float32, numerics)
            assert torch.equal(mine, images)
            assert torch.equal(targets, labels)


def test_parameters_are_aligned_views_of_one_tensor():
    model = build("resnet20", seed=0, width=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    numerics = Numerics(torch.device("cpu"), "bf16", channels_last=True)
    flat = Flat(model, numerics, PLAIN)
    for name, p in model.named_parameters():
        is_norm = "bn" in name
        assert p.dtype == (torch.float32 if is_norm else torch.bfloat16)
        assert torch.equal(flat.parts(flat.weights)[name], before[name])
        assert torch.equal(p, before[name].to(p.dtype))
        assert flat.slots[name].start % ALIGN == 0
        if p.dim() == 4:
            assert p.is_contiguous(memory_format=torch.channels_last)
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == {
        flat.low.untyped_storage().data_ptr(),
        flat.weights.untyped_storage().data_ptr(),
    }


def test_tied_and_frozen_parameters(data):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(64, 10).requires_grad_(False)

        def forward(self, x):
            return self.frozen(F.relu(self.second(F.relu(self.first(x.flatten(1))))))

    def tied():
        torch.manual_seed(1)
        return Tied()

    eager, fast = (make_run(data, network=tied) for _ in range(2))
    EagerTrainer(eager).train()
    GraphTrainer([fast]).train()
    assert spread(eager.model, fast.model) < 1e-5
    assert fast.model.first.weight is fast.model.second.weight


def test_what_cannot_be_trained_so_is_refused(data):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    with pytest.raises(ValueError, match=r"idle\.weight has no part in the loss; set its requires_grad"):
        GraphTrainer([make_run(data, network=Idle)]).train()
    mixed = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 10).double())  # noqa: E731
    with pytest.raises(ValueError, match=r"parameters are of torch\.float32, torch\.float64"):
        GraphTrainer([make_run(data, network=mixed)])
    with pytest.raises(ValueError, match=r"runs of 2 epochs of 5 steps and of 3 of 5 cannot"):
        GraphTrainer([make_run(data), make_run(data, recipe=replace(PLAIN, epochs=3))])
    with pytest.raises(ValueError, match="there are no runs"):
        GraphTrainer([])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA graphs need a GPU; use capture=False"):
            GraphTrainer([make_run(data)], capture=True)


def test_compiled_steps_trace_without_a_break(data, monkeypatch):
    monkeypatch.setattr(
        graph, "_compiled", lambda f: torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)
    )
    torch._dynamo.reset()
    recipe = replace(PLAIN, batch_size=100, epochs=1)  # batches of one size: one graph a function
    plain = make_run(data, recipe=recipe, masked=True)
    compiled = [make_run(data, seed, recipe=recipe, masked=True) for seed in (0, 1)]
    (expected,) = GraphTrainer([plain]).train()
    got, _ = GraphTrainer(compiled, compile=True).train()
    assert got.train_losses == pytest.approx(expected.train_losses, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # both networks run the same two


def odd(data, device="cpu"):
    """A run of a network whose channels are no multiple of eight, in bfloat16."""
    recipe = replace(PLAIN, precision="bf16", channels_last=True, batch_size=100, epochs=1)
    return make_run(data, recipe=recipe, device=device, network=lambda: build("small_convnet", seed=0, width=13))


def test_compiled_convolutions_are_filled_up_to_eight_channels(data, monkeypatch):
    monkeypatch.setattr(graph, "_compiled", lambda f: torch.compile(f, backend="aot_eager", dynamic=False))
    torch._dynamo.reset()
    compiled, plain = GraphTrainer([odd(data)], compile=True), GraphTrainer([odd(data)])
    kinds = [[type(m) for m in t._lanes[0].model.modules() if isinstance(m, nn.Conv2d)] for t in (compiled, plain)]
    assert set(kinds[0]) == {AlignedConv2d}
    assert set(kinds[1]) == {nn.Conv2d}
    (got,), (expected,) = compiled.train(), plain.train()
    assert got.train_losses == pytest.approx(expected.train_losses, rel=0.02)
    assert not any(isinstance(m, AlignedConv2d) for m in compiled.runs[0].model.modules())  # the user's own


class Recorded:
    """Stands in for CUDA where there is none: work within a capture is not done but kept, and done by `replay`."""

    def __init__(self):
        self.work = []

    def replay(self):
        for lane, size in self.work:
            lane.real_step(size)

    @classmethod
    def install(cls, trainer, monkeypatch):
        recording = []
        for lane in trainer._lanes:
            lane.real_step = lane.step
            lane.step = lambda size, lane=lane: (
                recording[-1].work.append((lane, size)) if recording else lane.real_step(size)
            )

        @contextmanager
        def capture(graph, pool, stream):
            recording.append(graph)
            yield
            recording.pop()

        class Stream:
            def __init__(self, device):
                self.waited = []

            def wait_stream(self, other):
                self.waited.append(other)

        nothing = lambda *args: nullcontext()  # noqa: E731
        stand_ins = {"CUDAGraph": cls, "graph": capture, "Stream": Stream, "stream": nothing, "device": nothing}
        stand_ins |= {"current_stream": nothing, "graph_pool_handle": nothing, "synchronize": nothing}
        stand_ins |= {"get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": nothing}
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize("count", [1, 2])
def test_warming_up_leaves_no_trace_and_replays_are_steps(data, monkeypatch, count):
    recipe = replace(PLAIN, precision="bf16", drops=(1,))
    plain, recorded = ([make_run(data, s, recipe, masked=True) for s in range(count)] for _ in range(2))
    expected = GraphTrainer(plain).train(data[1])
    trainer = GraphTrainer(recorded)
    Recorded.install(trainer, monkeypatch)
    before = trainer.states()
    trainer._capture()
    for state, fresh in zip(trainer.states(), before, strict=True):
        assert all(torch.equal(state[name], fresh[name]) for name in fresh)
    assert sorted(trainer._graphs) == [16, 96]  # 400 images: four whole batches and a short one
    assert [len(graph.work) for graph in trainer._graphs.values()] == [count, count]
    got = trainer.train(data[1])
    assert [result.train_losses for result in got] == [result.train_losses for result in expected]
    assert all(spread(a.model, b.model) == 0 for a, b in zip(plain, recorded, strict=True))


# On a GPU. Deterministic kernels and float32, so that what differs is the capture.

EXACT = replace(PLAIN, channels_last=True)


def resnet(seed=0):
    return lambda: build("resnet20", seed=seed, width=8, in_channels=1)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_captured_is_uncaptured(data, precision):
    recipe = replace(EXACT, precision=precision, drops=(1,), nesterov=True)
    captured, plain = (make_run(data, recipe=recipe, masked=True, device="cuda", network=resnet()) for _ in range(2))
    start = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
    trainer = GraphTrainer([captured], deterministic=True)
    trainer.write_back()
    kept = {n: p * plain.masks[n] if n in plain.masks else p for n, p in start.items()}
    assert all(torch.equal(p, kept[n]) for n, p in captured.model.named_parameters())  # warming up left no trace
    (got,) = trainer.train(data[1])
    (expected,) = GraphTrainer([plain], capture=False, deterministic=True).train(data[1])
    assert got.train_losses == pytest.approx(expected.train_losses, rel=1e-5)
    assert spread(captured.model, plain.model) < 1e-4
    assert got.test == pytest.approx(expected.test, abs=1e-3)
    assert all((captured.model.get_parameter(n)[~keep] == 0).all() for n, keep in captured.masks.items())


@pytest.mark.gpu
def test_captured_is_eager(data):
    recipe = replace(EXACT, epochs=1)
    captured, eager = (make_run(data, recipe=recipe, masked=True, device="cuda") for _ in range(2))
    one, other = GraphTrainer([captured], deterministic=True), EagerTrainer(eager)
    for trainer in (one, other):
        trainer.train_steps(3)
        trainer.write_back()
    assert spread(captured.model, eager.model) < 1e-4


@pytest.mark.gpu
def test_in_company_as_alone_on_a_gpu(data):
    def runs():
        wide = lambda: build("small_convnet", seed=5, width=6)  # noqa: E731
        return [
            make_run(data, 0, EXACT, device="cuda", network=resnet(0)),
            make_run(data, 1, EXACT, masked=True, device="cuda", network=resnet(1)),
            make_run(data, 2, replace(EXACT, lr=0.01), device="cuda", network=wide),
        ]

    company = runs()
    together = GraphTrainer(company, deterministic=True).train(data[1])
    for run, result, same in zip(runs(), together, company, strict=True):
        (alone,) = GraphTrainer([run], deterministic=True).train(data[1])
        assert alone.train_losses == result.train_losses
        assert spread(run.model, same.model) == 0


@pytest.mark.gpu
def test_compiled_and_captured(data):
    recipe = replace(EXACT, precision="bf16", epochs=1)
    compiled, plain = (
        [make_run(data, seed, recipe, masked=True, device="cuda", network=resnet(seed)) for seed in (0, 1)]
        for _ in range(2)
    )
    got = GraphTrainer(compiled, compile=True).train(data[1])
    expected = GraphTrainer(plain).train(data[1])
    for one, other in zip(got, expected, strict=True):
        assert one.train_losses == pytest.approx(other.train_losses, rel=0.02)


@pytest.mark.gpu
def test_compiled_and_captured_with_odd_channels(data):
    (got,) = GraphTrainer([odd(data, "cuda")], compile=True).train()
    (expected,) = GraphTrainer([odd(data, "cuda")]).train()
    assert got.train_losses == pytest.approx(expected.train_losses, rel=0.02)


@pytest.mark.gpu
def test_a_captured_run_resumes(data):
    whole = make_run(data, recipe=EXACT, device="cuda", network=resnet())
    GraphTrainer([whole], deterministic=True).train()
    broken = GraphTrainer([make_run(data, recipe=EXACT, device="cuda", network=resnet())], deterministic=True)
    broken.train_epoch()
    broken.train_steps(2)
    states = broken.states()
    resumed = make_run(data, recipe=EXACT, device="cuda", network=resnet(7))
    again = GraphTrainer([resumed], deterministic=True)
    again.load_states(states)
    again.train()
    assert spread(whole.model, resumed.model) < 1e-5


@pytest.mark.gpu
def test_dropout_draws_anew_in_every_step(data):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10, bias=False))

    before = torch.cuda.get_rng_state()
    torch.manual_seed(0)
    captured, plain = (make_run(data, recipe=EXACT, device="cuda", network=network) for _ in range(2))
    plain.model.load_state_dict(captured.model.state_dict())
    torch.cuda.set_rng_state(before)
    GraphTrainer([captured]).train()
    GraphTrainer([plain], capture=False).train()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert spread(captured.model, plain.model) < 1e-4


class Waiting(nn.Module):
    """Asks the GPU for a number in the midst of the forward pass."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 10)

    def forward(self, x):
        return self.line(x.flatten(1)) * (1.0 if x.sum().item() < 1e9 else 0.5)


@pytest.mark.gpu
def test_a_network_that_waits_for_the_gpu_is_trained_eagerly(data, monkeypatch):
    monkeypatch.setattr("prospr.lab.train.PAYS_FROM", 0)
    run = make_run(data, recipe=EXACT, device="cuda", network=Waiting)
    with pytest.raises(CaptureError, match="cannot be a CUDA graph"):
        GraphTrainer([run])
    with pytest.warns(UserWarning, match="training in plain PyTorch"):
        result = train(run.model, run.batches, data[1], EXACT)
    assert result.train_losses[-1] < result.train_losses[0]
    assert torch.cuda.get_sync_debug_mode() == 0
    again = make_run(data, recipe=EXACT, device="cuda")
    assert len(train(again.model, again.batches, data[1], EXACT).epochs) == 2  # and the next one is captured again


@pytest.mark.gpu
def test_five_runs_two_at_a_time(data):
    runs = [make_run(data, seed, replace(EXACT, precision="auto"), device="cuda") for seed in range(5)]
    told = []
    tell = lambda first, done, _: told.append((first, done))  # noqa: E731
    results = train_together(runs, data[1], together=2, progress=tell, engine="graph")
    assert len(results) == 5
    assert told == [(0, 1), (0, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
    assert all(result.train_losses[-1] < result.train_losses[0] for result in results)


@pytest.mark.gpu
def test_the_engine_follows_the_work(data):
    long = replace(EXACT, epochs=100)
    on_gpu = make_run(data, recipe=long, device="cuda")
    assert uses_graph(on_gpu, "auto")
    assert not uses_graph(make_run(data, recipe=EXACT, device="cuda"), "auto")  # ten steps are not worth a capture
    assert not uses_graph(replace(on_gpu, batches=replace(on_gpu.batches, augment=lambda i, g: i)), "auto")
    assert not uses_graph(make_run(data, recipe=long), "auto")
    assert not uses_graph(on_gpu, "eager")
