"""The whole way: score, select, check, apply."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import BY_NAME, CASES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prospr
from prospr import Magnitude, Method, ProsPr
from prospr.errors import CollapseError, CollapseWarning, InexactWarning, KeptWholeWarning, ZeroScoreWarning

MLP = BY_NAME["mlp"]
PRUNED = [case for case in CASES if case.name != "weight-norm"]  # its weights are computed: nothing to prune


def state(model):
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("method", prospr.methods())
def test_every_method_by_name(method):
    model = MLP.model()
    masks = prospr.prune(model, MLP.batches(10), 0.75, method=method)
    assert prospr.Masks.of(model) == masks
    chosen = prospr.methods()[method]
    assert chosen.reference
    assert chosen.cost
    if chosen.granularity == "channel":  # 67 parameters, of which 16.75 may stay; 11 go with one channel of the eight
        assert (masks.kept, masks.total) == (8, 64)
        assert sum(p.numel() for p in prospr.shrink(model, masks, MLP.batches(1)[0][0]).parameters()) == 11
        return
    assert (masks.kept, masks.total) == (14, 56)
    if chosen.once is not None:
        scores = prospr.score(MLP.model(), MLP.batches(10), method=method)
        expected = prospr.score(MLP.model(), MLP.batches(10), method=chosen.once)
        assert all(torch.equal(scores[name], expected[name]) for name in expected)
    elif chosen.rule.rounds == 1:
        scores = prospr.score(MLP.model(), MLP.batches(10), method=method)
        assert masks == prospr.select(scores, 0.75, scope=chosen.scope)
    else:
        with pytest.raises(prospr.errors.SettingError, match="has no one score"):
            prospr.score(MLP.model(), MLP.batches(10), method=method)


def test_the_names():
    assert {"prospr", "prospr-first", "prospr-published", "snip", "magnitude", "random", "erk"} <= set(prospr.methods())
    prospr.methods().clear()
    assert prospr.methods()


def test_a_method_by_name_by_score_and_whole():
    whole = Method(Magnitude(), scope="layer")
    by_name, by_score, by_method = (
        prospr.prune(MLP.model(), None, 0.5, method=method) for method in ("magnitude", Magnitude(), whole)
    )
    assert by_name == by_score
    assert {n: int(m.sum()) for n, m in by_method.items()} == {"0.weight": 16, "2.weight": 12}
    assert prospr.prune(MLP.model(), None, 0.5, method=whole, scope="global") == by_name


@pytest.mark.filterwarnings("ignore::prospr.errors.ZeroScoreWarning")
@pytest.mark.parametrize("case", PRUNED, ids=lambda case: case.name)
@pytest.mark.parametrize("method", ["prospr", "snip", "random"])
def test_every_case(case, method):
    """Pruned by half, it is traced from input to output, trains on, and stays sparse."""
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CollapseWarning)
        warnings.filterwarnings("ignore", r"unused\.weight: 0 of 9 weights kept \(another path", CollapseWarning)
        masks = prospr.prune(model, case.batches(4), 0.5, method=method, **case.settings)
    assert masks.kept == round(0.5 * masks.total)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9, weight_decay=0.01)
    for batch in case.batches(5, seed=2):
        optimizer.zero_grad()
        (case.loss or prospr.meta.loss.cross_entropy)(model, batch).backward()
        optimizer.step()
    for name, mask in masks.items():
        assert bool((model.get_parameter(name)[~mask] == 0).all())


def test_a_sparsity_of_zero_prunes_nothing():
    model = MLP.model()
    before = state(model)
    masks = prospr.prune(model, MLP.batches(4), 0.0)
    assert masks.kept == masks.total
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in before)


def test_pruning_twice_prunes_further():
    model = MLP.model()
    prospr.prune(model, MLP.batches(4), 0.5)
    zeros = model[0].weight == 0
    masks = prospr.prune(model, MLP.batches(4), 0.75)
    assert masks.kept == 14
    assert prospr.Masks.of(model) == masks
    assert bool((model[0].weight[zeros] == 0).all())


def test_scope_floor_and_seed_are_passed_on():
    masks = prospr.prune(MLP.model(), None, 0.9, method="random", keep_per_layer=2, scope="erk", seed=4)
    scores = prospr.score(MLP.model(), method="random", seed=4)
    assert masks == prospr.select(scores, 0.9, scope="erk", keep_per_layer=2)
    assert masks != prospr.prune(MLP.model(), None, 0.9, method="random", keep_per_layer=2, scope="erk", seed=5)


def test_only_what_is_prunable():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    model[0].weight.requires_grad_(False)
    before = state(model)
    masks = prospr.prune(model, MLP.batches(4), 0.5)
    assert list(masks) == ["2.weight"]
    assert torch.equal(model[0].weight, before["0.weight"])
    for which in (["0.weight"], lambda name, p: name == "0.weight"):
        model = MLP.model()
        before = state(model)
        assert list(prospr.prune(model, MLP.batches(4), 0.5, prunable=which)) == ["0.weight"]
        assert torch.equal(model[2].weight, before["2.weight"])


def test_an_eval_model_comes_back_in_eval_mode():
    case = BY_NAME["conv-batchnorm-maxpool"]
    model = case.model().eval()
    masks = prospr.prune(model, case.batches(4), 0.5)
    assert not any(m.training for m in model.modules())
    assert masks == prospr.prune(case.model(), case.batches(4), 0.5)


# --- batches and losses


def test_no_more_batches_are_read_than_needed():
    for method, count in (("snip", 1), (ProsPr(steps=2, lr=0.1), 3), ("prospr-one-shot", 4), ("prospr-first", 4)):
        read = []

        def batches(read=read):
            for batch in MLP.batches(9):
                read.append(batch)
                yield batch

        by_generator = prospr.prune(MLP.model(), batches(), 0.5, method=method)
        assert len(read) == count
        assert by_generator == prospr.prune(MLP.model(), MLP.batches(count), 0.5, method=method)


def test_the_default_is_in_rounds():
    """20 rounds, redrawn, mapped (and balanced, without maps): so said, the same masks; and 80 batches are read."""
    said = prospr.Iterative(ProsPr(steps=3), rounds=20, redraw=True)
    read = []
    by_generator = prospr.prune(MLP.model(), (read.append(b) or b for b in MLP.batches(100)), 0.5)
    assert len(read) == 80
    for scope in ("balanced", "mapped"):
        assert by_generator == prospr.prune(MLP.model(), MLP.batches(100), 0.5, method=said, scope=scope)
    assert by_generator != prospr.prune(MLP.model(), MLP.batches(100), 0.5, method="prospr-one-shot")


def test_batches_that_can_be_read_once_end_in_a_later_round():
    with pytest.raises(prospr.errors.BatchError, match=r"round 2 of 20: .*read once; pass a list or a loader"):
        prospr.prune(MLP.model(), iter(MLP.batches(4)), 0.5)


@pytest.mark.parametrize(("granularity", "scope"), [("channel", "balanced"), ("2:4", "global"), ((2, 2), "global")])
def test_what_goes_whole_goes_in_one_shot(granularity, scope):
    how = {"granularity": granularity, "sparsity": 0.5}
    once = prospr.prune(MLP.model(), MLP.batches(4), method="prospr-one-shot", scope=scope, **how)
    assert prospr.prune(MLP.model(), MLP.batches(4), **how) == once


def test_batches_of_any_form():
    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]) / batch["temperature"], batch["y"])

    dicts = [{"x": x, "y": y, "temperature": 1.0} for x, y in MLP.batches(4)]
    assert prospr.prune(MLP.model(), dicts, 0.5, loss=loss) == prospr.prune(MLP.model(), MLP.batches(4), 0.5)


def test_a_loss_without_data():
    """A batch may be anything, None too."""
    model = MLP.model()
    masks = prospr.prune(model, [None] * 4, 0.75, loss=lambda m, _: m(torch.eye(4).double()).square().mean())
    assert masks.kept == 14


class Packed(nn.Module):
    """Takes lengths beside its input, which fit the whole batch alone; by keyword."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x, *, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][-1])


@pytest.mark.parametrize("open_", [True, False])
def test_a_model_that_cannot_take_one_sample(open_):
    model = Packed()
    batch = torch.randn(4, 5, 3), torch.tensor([5, 4, 3, 2]), torch.tensor([0, 1, 0, 1])
    loss = lambda m, b: F.cross_entropy(m(b[0], lengths=b[1]), b[2])  # noqa: E731
    if open_:
        assert prospr.prune(model, [batch], 0.5, method="snip", loss=loss).kept == 22
    else:
        nn.init.constant_(model.out.weight, 1e-6)
        with pytest.raises(CollapseError, match=r"out\.weight: 0 of 4 weights kept"):
            prospr.prune(model, [batch], 0.5, method="magnitude", loss=loss)


def test_a_loss_that_differentiates_and_never_calls_the_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def smooth(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model[2](model[1](model[0](x)))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    nn.init.constant_(model[2].weight, 1e-6)
    with pytest.warns(CollapseWarning, match=r"2\.weight: 0 of 24 .*unknown whether a path is left"):
        prospr.prune(model, MLP.batches(1), 0.5, method="magnitude", loss=smooth)
    by_forward = prospr.prune(
        MLP.model(), MLP.batches(4), 0.5, loss=lambda m, b: F.cross_entropy(m.forward(b[0]), b[1])
    )
    assert by_forward == prospr.prune(MLP.model(), MLP.batches(4), 0.5)


def test_a_compiled_model():
    model = MLP.model()
    compiled = torch.compile(model, backend="eager")
    masks = prospr.prune(compiled, MLP.batches(4), 0.5)
    assert masks == prospr.prune(MLP.model(), MLP.batches(4), 0.5)
    assert list(masks) == list(prospr.score(compiled, MLP.batches(4))) == ["0.weight", "2.weight"]
    assert prospr.Masks.of(compiled) == prospr.Masks.of(model) == masks


def test_a_data_parallel_model(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = MLP.model()
        wrapped = DistributedDataParallel(model)
        masks = prospr.prune(wrapped, MLP.batches(4), 0.5)
        assert masks == prospr.prune(MLP.model(), MLP.batches(4), 0.5)
        assert list(masks) == list(prospr.score(wrapped, MLP.batches(4))) == ["0.weight", "2.weight"]
        masks.remove(wrapped)
    finally:
        dist.destroy_process_group()


def test_norm_scales_can_be_pruned():
    case = BY_NAME["conv-batchnorm-maxpool"]
    model = case.model()
    nn.init.uniform_(model[1].weight)
    masks = prospr.prune(model, case.batches(1), 0.5, method="snip", prunable=["1.weight"])
    assert int(model[1].weight.count_nonzero()) == masks.kept == 2


def test_zero_scores_are_told():
    model = MLP.model()
    with torch.no_grad():
        model[0].weight.zero_()[0, :2] = 1.0
    with pytest.warns(ZeroScoreWarning):
        prospr.prune(model, None, 0.25, method="magnitude")


def test_weights_that_are_computed_are_named():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 20))
    model = nn.Sequential(normed, nn.ReLU(), nn.Linear(20, 3))
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,)))]
    with pytest.warns(KeptWholeWarning, match="^0: the weight is computed"):
        masks = prospr.prune(model, batches, 0.5, method="snip")
    assert list(masks) == ["2.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prospr.prune(model, batches, 0.5, method="snip", prunable=["2.weight"])


def test_pruning_what_is_pruned_says_how_much_of_it_is_zero():
    model = MLP.model()
    first = prospr.prune(model, None, 0.5, method="random")
    with pytest.warns(InexactWarning, match="weights now kept are zeros of theirs"):
        second = prospr.prune(model, None, 0.8, method="random", seed=1)
    assert any((second[name] & ~first[name]).any() for name in second)


def test_an_example_serves_the_check_for_collapse():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    with pytest.raises(CollapseError, match=r"0\.weight: 0 of 24"):
        prospr.prune(model, None, 0.8, method="magnitude", example=torch.ones(1, 4))


@pytest.mark.parametrize("method", prospr.methods())
def test_another_default_device(method):
    """As after torch.set_default_device("cuda"); what is made on the meta device has no numbers, so none may be."""
    model, batches = MLP.model(), MLP.batches(10)
    wanted = prospr.prune(MLP.model(), batches, 0.75, method=method)
    with torch.device("meta"):
        assert prospr.prune(model, batches, 0.75, method=method) == wanted


@pytest.mark.parametrize("method", ["prospr-one-shot", "grasp", "snip"])
def test_functions_called_by_keyword(method):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

        def forward(self, x):
            h = F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias)
            return F.linear(input=F.relu(input=h).flatten(1), weight=self.head.weight, bias=self.head.bias)

    class Plain(Called):
        def forward(self, x):
            return self.head(F.relu(self.conv(x)).flatten(1))

    batches = [(torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(5)]
    called, plain = Called().double(), Plain().double()
    plain.load_state_dict(called.state_dict())
    found, wanted = (prospr.score(model, batches, method=method) for model in (called, plain))
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-10) for name in wanted)
    prospr.prune(called, batches, 0.5, method=method)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_merges_weights_for_inference(training):
    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            if mode == self.merged:
                self.weight.data.mul_(0.5 if mode else 2.0)
                self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(6, 8), nn.ReLU(), nn.Linear(8, 3)).train(training)
    before, batches = state(model), [(torch.randn(8, 6), torch.randint(0, 3, (8,)))]
    for method in ("snip", "magnitude", "synflow", "ntk-sap"):
        prospr.prune(model, batches, 0.5, method=method).remove(model)
        model.load_state_dict(before)
        assert model[0].merged is not training
        assert all(module.training is training for module in model.modules())
    prospr.score(model, batches, method="snip")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
