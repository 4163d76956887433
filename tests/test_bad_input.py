"""Bad input: each is a PruningError that says what and what to do, and the model comes back untouched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from torch import nn

import prospr
from prospr import ProsPr, errors

MLP = BY_NAME["mlp"]


@pytest.fixture
def model():
    """A model that is compared with itself after the test."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    before, attributes = copy.deepcopy(model.state_dict()), [sorted(m.__dict__) for m in model.modules()]
    parameters, random = list(model.parameters()), torch.get_rng_state()
    yield model
    assert list(model.state_dict()) == list(before)  # no masks left
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is None and not p._backward_hooks for p in parameters)
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    hooks = [value for m in model.modules() for key, value in m.__dict__.items() if "hook" in key and value]
    assert hooks == []
    assert not any(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def refuses(kind, message, model, batches, sparsity=0.5, **settings):
    assert issubclass(kind, prospr.PruningError)
    with pytest.raises(kind, match=message):
        prospr.prune(model, batches, sparsity, **settings)


def both_refuse(kind, message, model, batches, **settings):
    refuses(kind, message, model, batches, **settings)
    with pytest.raises(kind, match=message):
        prospr.score(model, batches, **settings)


# --- batches


@pytest.mark.parametrize("method", ["prospr", "snip", "prospr-first", ProsPr(lr=0.1), ProsPr(same_batch=True)])
@pytest.mark.parametrize("batches", [list, lambda: iter([]), lambda: (b for b in ())])
def test_no_batches(model, method, batches):
    refuses(errors.BatchError, "batches is empty; pass at least one", model, batches(), method=method)
    with pytest.raises(errors.BatchError, match="batches is empty; pass at least one"):
        prospr.score(model, batches(), method=method)


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_too_few_batches(model, order, lr):
    message = r"batches holds 3, and 5 steps need 6 .*; pass more batches, or lower steps"
    both_refuse(errors.BatchError, message, model, MLP.batches(3), method=ProsPr(steps=5, order=order, lr=lr))


def test_batches_missing(model):
    both_refuse(errors.BatchError, "this method looks at data; pass batches", model, None)


@pytest.mark.parametrize("method", ["prospr", "snip", ProsPr(lr=0.1)])
def test_batches_that_are_not_iterable(model, method):
    both_refuse(errors.BatchError, "batches must be an iterable of batches.*got int", model, 5, method=method)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.randn(6, 4).double(), r"a single tensor of shape \(6, 4\)"),
        ((torch.randn(6, 4).double(),), "a tuple of 1 items"),
        ([torch.randn(6, 4).double()] * 3, "a list of 3 items"),
        ({"x": torch.randn(6, 4).double()}, "a dict"),
        ("ab", "a str"),
        (None, "a NoneType"),
    ],
)
def test_a_batch_that_is_not_a_pair(model, batch, found):
    message = rf"takes a batch \(inputs, targets\), and got {found}; pass loss="
    both_refuse(errors.BatchError, message, model, [batch] * 4)


# --- losses


def outputs(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (outputs, r"shape \(6,\) at step 0; reduce it to a scalar, for instance with \.mean\(\)"),
        (lambda m, b: outputs(m, b)[:1], r"shape \(1,\) at step 0; reduce it to a scalar"),
        (lambda m, b: outputs(m, b).mean().item(), "returned a float; it must return a scalar tensor"),
        (lambda m, b: None, "returned a NoneType; it must return a scalar tensor"),
        (lambda m, b: outputs(m, b).mean().detach(), "does not depend on any parameter .*detached"),
        (torch.no_grad()(lambda m, b: outputs(m, b).mean()), r"does not depend on any .*torch\.no_grad\(\)"),
    ],
)
@pytest.mark.parametrize("method", ["snip", "prospr"])
def test_a_loss_that_is_no_loss(model, loss, message, method):
    with pytest.raises(prospr.PruningError, match=message):
        prospr.prune(model, MLP.batches(4), 0.5, method=method, loss=loss)


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("snip", errors.ScoreError, "all scores are 0, so they rank nothing"),
        ("prospr", errors.DerivativeError, "the loss has no curvature at these weights"),
    ],
)
def test_a_loss_of_something_else(model, method, kind, message):
    other = torch.ones((), requires_grad=True)
    refuses(kind, message, model, MLP.batches(4), method=method, loss=lambda m, b: other * 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["snip", ProsPr(lr=0.1), ProsPr(lr=0.1, order="first")])
def test_a_loss_that_is_not_finite_from_the_start(model, value, method):
    loss = lambda m, b: outputs(m, b).mean() * value  # noqa: E731
    message = rf"the loss is {value} at step 0 of [03]; check the batch and the loss at the initial weights"
    both_refuse(errors.LossError, message, model, MLP.batches(4), method=method, loss=loss)


def test_inputs_that_are_not_finite(model):
    batches = MLP.batches(4)
    batches[0][0][2, 1] = float("nan")
    with pytest.raises(errors.LossError, match="the loss is nan at step 0; check the batch"):
        prospr.prune(model, batches, 0.5)
    with pytest.raises(errors.LossError, match="the loss is nan at step 0 of 3"):
        prospr.prune(model, batches, 0.5, method=ProsPr(lr=0.1))


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize(("bad", "where"), [(2, "at step 2 of 3"), (3, "after all 3 steps")])
def test_a_bad_batch_on_the_way(model, order, bad, where):
    batches = MLP.batches(4)
    batches[bad][0][0, 0] = float("inf")
    message = f"the loss is nan {where}; the inner training diverged: lower its learning rate"
    both_refuse(errors.LossError, message, model, batches, method=ProsPr(lr=0.1, order=order))


@pytest.mark.parametrize("order", ["exact", "first"])
def test_inner_training_that_diverges(model, order):
    loss = lambda m, b: m(b[0]).square().square().mean()  # noqa: E731
    message = r'the loss is (nan|inf) (at step [1-7] of|after all) 8.*diverged: lower its learning rate \(lr="auto"'
    method = ProsPr(steps=8, lr=1e30, order=order)
    both_refuse(errors.LossError, message, model, MLP.batches(9), method=method, loss=loss)


# --- settings


@pytest.mark.parametrize("sparsity", [1, 1.0, -0.1, 1.5, "x", "0.5", None, float("nan"), float("inf"), [0.5], True])
def test_sparsity(model, sparsity):
    refuses(errors.SettingError, "sparsity=.*: use a number from 0 up to, not including, 1", model, None, sparsity)


@pytest.mark.parametrize("method", ["prosper", "", None, 3, ["snip"], {"a": 1}, ProsPr, int])
def test_an_unknown_method(model, method):
    message = r"method=.* is not known; use one of prospr, .*snip, .*or a prospr\.Score"
    both_refuse(errors.SettingError, message, model, MLP.batches(4), method=method)


def test_an_unknown_scope(model):
    refuses(
        errors.SettingError,
        "scope='uniform': use 'global', 'balanced', 'mapped', 'tapered', 'spread', 'focused', 'layer' or 'erk'",
        model,
        MLP.batches(4),
        scope="uniform",
    )


def test_an_unknown_collapse(model):
    message = "collapse='raise': use 'error', 'warn' or 'ignore'"
    refuses(errors.SettingError, message, model, MLP.batches(4), collapse="raise")


def test_a_floor_that_does_not_fit(model):
    message = "keep_per_layer=20 needs 40 weights, and this sparsity keeps 6; lower one of them"
    refuses(errors.SettingError, message, model, MLP.batches(4), 0.9, keep_per_layer=20)


# --- models and scores


def test_nothing_to_prune(model):
    both_refuse(errors.ModelError, "BatchNorm1d has nothing to prune", model[1], MLP.batches(4))
    both_refuse(errors.ModelError, "chose none of the 6", model, MLP.batches(4), prunable=[])
    both_refuse(errors.ModelError, r"names '9\.weight', which is not", model, MLP.batches(4), prunable=["9.weight"])


@pytest.mark.parametrize("loss", ["cross_entropy", 0.5, None])
def test_a_loss_that_is_no_function(model, loss):
    message = r"loss=.*: use a function of \(model, batch\) that returns a scalar tensor"
    both_refuse(errors.SettingError, message, model, MLP.batches(4), loss=loss)


@pytest.mark.parametrize("seed", [0.5, "1", None, 2**63])
def test_a_seed_that_is_no_whole_number(model, seed):
    both_refuse(errors.SettingError, f"seed={seed!r}: use a whole number", model, MLP.batches(4), seed=seed)


def test_an_inner_optimizer_that_is_not_ours():
    model = MLP.model()
    loss = prospr.meta.pure_loss(model)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    for other, kind in ((theirs, "SGD"), ("sgd", "str"), (prospr.meta.SGD, "type")):
        with pytest.raises(errors.SettingError, match=f"the inner optimizer is a {kind}: use one of prospr.meta's"):
            prospr.meta.metagrad(loss, loss.params(), MLP.batches(3), other)


def test_everything_frozen():
    frozen = MLP.model().requires_grad_(False)
    both_refuse(errors.ModelError, "Sequential has nothing to prune: no trainable weight", frozen, MLP.batches(4))


def test_all_scores_zero(model):
    """The loss looks at a bias alone."""
    loss = lambda m, b: m[3].bias.square().sum() + 0 * m(b[0]).sum()  # noqa: E731
    message = "all scores are 0, so they rank nothing: does the loss depend on the weights"
    refuses(errors.ScoreError, message, model, MLP.batches(4), method="snip", loss=loss)


def test_all_scores_equal(model):
    class Equal(prospr.Score):
        def score(self, problem):
            return {name: torch.full_like(w, 0.5) for name, w in problem.weights().items()}

    refuses(errors.ScoreError, r"all scores are 0\.5, so they rank nothing", model, None, method=Equal())


def test_scores_that_are_not_finite(model):
    class Bad(prospr.Score):
        def score(self, problem):
            return {name: w / 0 if name == "3.weight" else w for name, w in problem.weights().items()}

    refuses(errors.ScoreError, r"3\.weight: 24 of 24 scores are NaN or infinite", model, None, method=Bad())


def test_a_collapse(model):
    class First(prospr.Score):
        def score(self, problem):
            return {name: w.abs() + 100 * (name == "0.weight") for name, w in problem.weights().items()}

    message = r"no path is left .*3\.weight: 0 of 24 weights kept.*lower the sparsity"
    refuses(errors.CollapseError, message, model, MLP.batches(1), 0.9, method=First())


# --- masks


def test_masks_of_another_network(model):
    with torch.random.fork_rng():
        other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        wider = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    masks = prospr.prune(other, None, 0.5, method="magnitude")
    for use in (masks.apply, masks.to_torch, masks.remove):
        with pytest.raises(errors.MaskError, match=r"2\.weight: Sequential has no such parameter .*another network"):
            use(model)
    masks = prospr.prune(wider, None, 0.5, method="magnitude")
    for use in (masks.apply, masks.to_torch, masks.remove):
        with pytest.raises(
            errors.MaskError, match=r"0\.weight: the mask has shape \(8, 5\) and the parameter \(8, 4\)"
        ):
            use(model)


def test_a_corrupt_file(tmp_path):
    path = tmp_path / "masks.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}{}{}{}")
    with pytest.raises(
        errors.MaskFileError, match=r"masks\.safetensors: not a readable mask file .*save the masks again"
    ):
        prospr.Masks.load(path)


@pytest.mark.parametrize(
    "settings",
    [{"order": "second"}, {"store": "disk"}, {"mode": "x"}, {"kappa": -1}, {"kappa": "a"}, {"micro_batch": 0}],
)
def test_settings_of_prospr_are_checked_before_anything_is_scored(settings):
    ((name, _),) = settings.items()
    with pytest.raises(prospr.errors.SettingError, match=f"{name}="):
        prospr.ProsPr(**settings)


def test_score_refuses_what_it_would_ignore():
    model = torch.nn.Linear(5, 3)
    batches = [(torch.randn(8, 5), torch.randint(0, 3, (8,)))]
    with pytest.raises(prospr.errors.SettingError, match="granularity='nonsense'"):
        prospr.score(model, batches, method="snip", granularity="nonsense")
    with pytest.raises(prospr.errors.SettingError, match="leave redraw=True out"):
        prospr.score(model, batches, method=prospr.Iterative(prospr.Snip(), rounds=1, redraw=True))
