"""Rounds of pruning: nested or not, exact, deterministic, and one of them is one shot."""

import itertools
import re
from dataclasses import dataclass, field, replace

import pytest
import torch
from cases import BY_NAME, CASES

import prospr
from prospr import Iterative, Magnitude, ProsPr, Random, Score, Snip
from prospr.errors import CollapseError, ModelError, SettingError
from prospr.lab.models import build
from prospr.meta.batches import Stream
from prospr.meta.loss import called_with

PRUNABLE = [case for case in CASES if case.name != "weight-norm"]  # its weights are computed: nothing to prune


@dataclass(frozen=True)
class Watched(Score):
    """A score that keeps the masks and the batches it was asked with."""

    score_: Score
    masks: list = field(default_factory=list)

    def score(self, problem):
        self.masks.append(None if problem.masks is None else dict(problem.masks))
        return self.score_.score(problem)


@pytest.mark.parametrize(
    ("schedule", "want"), [("exponential", [0.684, 0.9, 0.968, 0.99]), ("linear", [0.2475, 0.495, 0.7425, 0.99])]
)
def test_the_share_pruned_after_each_round(schedule, want):
    got = Iterative(Snip(), rounds=4, schedule=schedule).sparsities(0.99)
    assert got == pytest.approx(want, abs=5e-4)
    assert got[-1] == 0.99


@pytest.mark.parametrize("score", [Snip(), ProsPr(steps=2, lr=0.1), Magnitude(), Random(), prospr.Grasp()])
@pytest.mark.parametrize("name", ["residual", "attention", "dropout"])
def test_one_round_is_one_shot(score, name):
    case = BY_NAME[name]
    scores = prospr.score(case.model(), case.batches(4), method=score)
    for recover in (False, True):
        masks = prospr.prune(
            case.model(), case.batches(4), 0.8, method=Iterative(score, rounds=1, recover=recover), collapse="ignore"
        )
        assert masks == prospr.select(scores, 0.8)


@pytest.mark.parametrize("score", [Snip(), ProsPr(steps=2, lr=0.1)])
def test_what_is_pruned_stays_pruned(score):
    case = BY_NAME["conv-batchnorm-maxpool"]
    watched = Watched(score)
    last = prospr.prune(case.model(), case.batches(6), 0.9, method=Iterative(watched, rounds=6), collapse="ignore")
    rounds = [*watched.masks[1:], last]
    assert watched.masks[0] is None
    for before, after in itertools.pairwise(rounds):
        assert all(bool((after[n] <= before[n]).all()) for n in after)
        assert sum(int(m.sum()) for m in after.values()) < sum(int(m.sum()) for m in before.values())


@pytest.mark.parametrize("scope", ["global", "balanced", "mapped", "tapered", "spread", "focused", "layer", "erk"])
def test_masks_are_nested_in_every_scope(scope):
    """Layer densities in whole weights: a smaller total may round up to one more in some layer."""
    case = BY_NAME["mlp"]
    watched = Watched(Random())
    last = prospr.prune(
        case.model(), case.batches(1), 0.9, method=Iterative(watched, rounds=40), scope=scope, collapse="ignore"
    )
    rounds = [*watched.masks[1:], last]
    for before, after in itertools.pairwise(rounds):
        assert all(bool((after[n] <= before[n]).all()) for n in after)
    assert last.kept == round(0.1 * last.total)


def test_in_balanced_rounds_layers_come_to_keep_as_many_each():
    sizes = {"0.weight": (20, 20), "2.weight": (200, 20), "4.weight": (4, 200)}
    layers = [torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 200), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(200, 4))
    assert {n: tuple(p.shape) for n, p in prospr.prunable(model).items()} == sizes
    with torch.no_grad():
        model[0].weight.mul_(100)  # of magnitudes compared as they are, this layer's would all stay
    how = {"method": Iterative(Magnitude(), rounds=100), "collapse": "ignore"}
    counts = [int(mask.sum()) for mask in prospr.prune(model, None, 0.97, scope="balanced", **how).values()]
    assert sum(counts) == round(0.03 * 5200)
    assert min(counts) > 0.7 * max(counts)


def test_the_default_leaves_no_layer_thin():
    """98.2 % of a narrow ResNet-20, some 60 weights a layer: others leave some with a handful or fewer."""
    rng = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 3, 8, 8, generator=rng), torch.randint(0, 10, (16,), generator=rng)) for _ in range(80)]
    fewest = {}
    for method in ("prospr", "prospr-one-shot", "snip"):
        masks = prospr.prune(build("resnet20", seed=0, width=8), batches, 0.982, method=method, collapse="ignore")
        fewest[method] = min(int(mask.sum()) for mask in masks.values())
    assert fewest["prospr"] >= 30
    assert fewest["prospr-one-shot"] < 10
    assert fewest["snip"] < 10


def test_redrawn_rounds_score_the_same_values_in_other_places():
    case = BY_NAME["mlp"]
    seen = []

    class Looking(Score):
        def score(self, problem):
            weights = problem.weights()
            start = problem.start(problem.pure_loss())
            masks = problem.masks or {}
            for name, w in weights.items():  # what is scored is what is trained, where it is not pruned
                assert torch.equal(start[name], w * masks[name] if name in masks else w)
            seen.append({name: w.clone() for name, w in weights.items()})
            return Random().score(problem)

    def prune(model, **how):
        seen.clear()
        masks = prospr.prune(model, case.batches(1), 0.9, method=Iterative(Looking(), 3, **how), collapse="ignore")
        return masks, list(seen)

    model = case.model()
    first = {name: p.detach().clone() for name, p in prospr.prunable(model).items()}
    masks, rounds = prune(model, redraw=True)
    for name, w in first.items():
        for one in rounds:
            assert torch.equal(one[name].flatten().sort().values, w.flatten().sort().values)
            assert not torch.equal(one[name], w)
        assert not torch.equal(rounds[0][name], rounds[1][name])
        assert torch.equal(dict(model.named_parameters())[name], w * masks[name])  # the model keeps its own weights
    again, _ = prune(case.model(), redraw=True)
    assert again == masks
    _, plain = prune(case.model())
    assert all(torch.equal(plain[2][name], w) for name, w in first.items())


def test_redrawing_leaves_zeros_where_they_are():
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight[:, ::2] = 0
    got = []

    class Looking(Score):
        def score(self, problem):
            got.append(problem.weights()["weight"])
            return Random().score(problem)

    prospr.prune(model, None, 0.5, method=Iterative(Looking(), 2, redraw=True), collapse="ignore")
    assert all(bool((w[:, ::2] == 0).all() and (w[:, 1::2] != 0).all()) for w in got)


def test_force_brings_weights_back_and_iter_snip_does_not():
    case = BY_NAME["conv-batchnorm-maxpool"]
    returned = {}
    for recover in (False, True):
        watched = Watched(Snip())
        last = prospr.prune(
            case.model(), case.batches(6), 0.9, method=Iterative(watched, rounds=12, recover=recover), collapse="ignore"
        )
        rounds = [*watched.masks[1:], last]
        returned[recover] = sum(
            int((after[n] & ~before[n]).sum()) for before, after in itertools.pairwise(rounds) for n in after
        )
    assert returned[False] == 0
    assert returned[True] > 0


def test_force_scores_dense_weights_at_the_sparse_network():
    """|w_init g(c w_init)|, also where c = 0: a straightforward implementation of one round."""
    case = BY_NAME["mlp"]
    model, batch = case.model(), case.batches(1)[0]
    first = prospr.select(prospr.score(model, [batch], method="snip"), 0.5)
    watched = Watched(Snip())
    masks = prospr.prune(
        case.model(),
        [batch],
        0.75,
        method=Iterative(watched, rounds=2, schedule="exponential", recover=True),
        collapse="ignore",
    )
    assert watched.masks[1].keys() == first.keys()
    assert all(torch.equal(watched.masks[1][n], first[n]) for n in first)
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, m in first.items():
            model.get_parameter(n).mul_(m)
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    by_hand = {n: (dense[n] * model.get_parameter(n).grad).abs() for n in first}
    assert masks == prospr.select(by_hand, 0.75)


def test_pruned_weights_rest_in_the_inner_steps_of_a_later_round():
    """Iterative ProsPr without recovery scores the sparse network: a twin that is really sparse gives the same."""
    case = BY_NAME["mlp"]
    method = ProsPr(steps=3, lr=0.3, momentum=0.9)
    first = prospr.select(prospr.score(case.model(), case.batches(8), method=method), 0.5)
    both = prospr.prune(case.model(), case.batches(8), 0.75, method=Iterative(method, rounds=2), collapse="ignore")
    # by hand: unrolled SGD in which the gradient of a pruned weight is dropped, on the second four batches
    model, batches = case.model(), case.batches(8)[4:]
    start = {
        n: (p.detach() * first[n] if n in first else p.detach()).requires_grad_() for n, p in model.named_parameters()
    }
    w, state = dict(start), {}
    for x, y in batches[:-1]:
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, w, (x,)), y)
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values()), create_graph=True), strict=True))
        grads = {n: g * first[n] if n in first else g for n, g in grads.items()}
        state = {n: 0.9 * state[n] + g if n in state else g for n, g in grads.items()}
        w = {n: p - 0.3 * state[n] for n, p in w.items()}
    x, y = batches[-1]
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, w, (x,)), y)
    lam = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
    scores = {n: (start[n] * lam[n]).detach().abs() for n in first}
    scores = {n: torch.where(first[n], s, -1.0) for n, s in scores.items()}
    assert both == prospr.select(scores, 0.75)


def quick(name):
    """A method as it is named, in few rounds, and with one batch where it would read ten."""
    method = prospr.methods()[name]
    rule = method.rule
    if name == "ntk-sap":  # it draws weights anew, and some networks hold some that no layer's reset redraws
        rule = replace(
            rule, score=replace(rule.score, redraws=1, init=lambda m: [p.normal_(0, 0.3) for p in m.parameters()])
        )
    return replace(method, score=replace(rule, rounds=min(rule.rounds, 3)))


def size_without_channels(model, masks, case):
    """Parameters that are left of a network when the channels that were pruned are taken out of it."""
    args, kwargs = called_with(model, case.loss or prospr.meta.loss.cross_entropy, case.batches(1)[0])
    small = prospr.shrink(model, masks, kwargs or args)
    return sum(p.numel() for p in small.parameters())


@pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")
@pytest.mark.parametrize("case", PRUNABLE, ids=lambda c: c.name)
@pytest.mark.parametrize("name", list(prospr.methods()))
def test_every_method_on_every_network(name, case):
    for sparsity in (0.5, 0.9, 0.99):
        outcomes = []
        for attempt in range(2):
            model = case.model()
            before = {n: t.clone() for n, t in model.state_dict().items()}
            torch.manual_seed(attempt)  # the global random state plays no part, and is left as it was
            state = torch.get_rng_state()
            try:
                masks = prospr.prune(
                    model, case.batches(10), sparsity, method=quick(name), collapse="ignore", **case.settings
                )
            except (CollapseError, ModelError, SettingError) as error:
                # so few weights that a round finds nothing left to score; channels that cannot go
                outcomes.append(error)
                same = all(torch.equal(t, model.state_dict()[n]) for n, t in before.items())
            else:
                same = True
                if prospr.methods()[name].granularity == "channel":
                    assert size_without_channels(model, masks, case) <= (1 - sparsity) * sum(
                        p.numel() for p in model.parameters()
                    )
                else:
                    assert masks.kept == max(1, round((1 - sparsity) * masks.total))
                outcomes.append(masks)
                masks.remove(model)
                for n, t in [*model.named_parameters(), *model.named_buffers()]:  # tied weights once
                    assert torch.equal(t, before[n] * masks[n] if n in masks else before[n]), n
            assert same
            assert torch.equal(state, torch.get_rng_state())
        first, second = outcomes
        if isinstance(first, Exception):
            assert (type(first), str(first)) == (type(second), str(second))
            if prospr.methods()[name].granularity == "channel":
                said = r"cannot be reached.*it ends at 0\.\d+; lower it|no channel of this network can go: .*weight"
                assert re.search(said, str(first))
            else:
                assert isinstance(first, CollapseError)
                assert sparsity > 0.5
                assert "keep_per_layer" in str(first)
        else:
            assert first == second


def test_a_network_that_is_cut_on_the_way_names_the_layer():
    case = BY_NAME["mlp"]
    with pytest.raises(CollapseError, match=r"keep_per_layer=1"):
        prospr.prune(case.model(), case.batches(4), 0.97, method=Iterative(Snip(), rounds=20, schedule="linear"))


def test_rounds_read_on_and_begin_again():
    seen = []

    def loss(model, batch):
        seen.append(batch[0][0, 0].item())
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    case = BY_NAME["mlp"]
    batches = case.batches(3)
    marks = [batch[0][0, 0].item() for batch in batches]
    prospr.prune(case.model(), batches, 0.5, method=Iterative(Snip(), rounds=5), loss=loss, collapse="ignore")
    assert seen == [marks[i] for i in (0, 1, 2, 0, 1)]
    with pytest.raises(prospr.errors.BatchError, match="empty"):
        prospr.prune(case.model(), iter(batches), 0.5, method=Iterative(Snip(), rounds=5), loss=loss, collapse="ignore")


def test_a_stream_never_repeats_within_a_round():
    stream = Stream([1, 2, 3])
    assert list(stream) == [1, 2, 3]
    stream.next_round()
    assert [next(stream), next(stream)] == [1, 2]
    stream.next_round()
    assert stream.peek() == [3]
    assert list(stream) == [3, 1, 2]
    once = Stream(iter([1, 2]))
    assert list(once) == [1, 2]
    once.next_round()
    assert list(once) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Iterative("snip"), "score='snip'"),
        (lambda: Iterative(Snip(), rounds=0), "rounds=0"),
        (lambda: Iterative(Snip(), schedule="cubic"), "schedule='cubic'"),
        (lambda: Snip(batches=0), "batches=0"),
    ],
)
def test_impossible_settings(make, says):
    with pytest.raises(SettingError, match=says):
        make()


def test_snip_over_many_batches_is_the_mean_gradient():
    case = BY_NAME["mlp"]
    model, batches = case.model(), case.batches(3)
    total = torch.stack([torch.nn.functional.cross_entropy(model(x), y) for x, y in batches]).mean()
    grads = dict(zip(dict(model.named_parameters()), torch.autograd.grad(total, list(model.parameters())), strict=True))
    want = {n: (p * grads[n]).detach().abs() for n, p in model.named_parameters() if p.dim() > 1}
    size = sum(t.sum() for t in want.values())
    scores = prospr.score(model, batches, method=Snip(batches=3))
    assert all(torch.allclose(scores[n], want[n] / size, rtol=1e-12) for n in want)


def test_weights_left_that_all_score_the_same_are_a_collapse_and_not_a_choice_by_position():
    """Cut on the way: every gradient is zero, and nothing may be chosen among zeros without a word."""

    class Cut(Score):
        def score(self, problem):
            full = {name: w.abs() for name, w in problem.weights().items()}
            if problem.masks is None:
                return full
            return {name: torch.where(problem.masks[name], 0.0, 1.0) for name in full}  # only what is pruned differs

    case = BY_NAME["mlp"]
    with pytest.raises(CollapseError, match=r"round 2 of 3.*all weights that are left score 0.*keep_per_layer=1"):
        prospr.prune(case.model(), case.batches(1), 0.9, method=Iterative(Cut(), rounds=3), collapse="ignore")
