"""A plan and a state_dict are a checkpoint; what a plan may do to a network is little."""

import copy
import io
import json

import pytest
import torch
from channels.networks import BY_NAME
from channels.twins import twins_of
from torch import nn

import prospr
from prospr.channels import Plan
from prospr.errors import PlanError

NAMES = ["resnet20-a", "mobilenet", "unet", "group-norm", "vit", "tied", "constant-pad"]


def same(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return list(one) == list(two) and all(torch.equal(t, two[key]) for key, t in one.items())


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name, tmp_path):
    twins = twins_of(BY_NAME[name])
    again = Plan.from_json(twins.plan.to_json())
    assert again == twins.plan
    twins.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == twins.plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert same(again.shrink(twins.masked), twins.small)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_a_state_dict_and_a_plan(name):
    network = BY_NAME[name]
    twins = twins_of(network)
    file = io.BytesIO()
    torch.save({"model": twins.small.state_dict(), "plan": twins.plan.to_json()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    with torch.device("meta"):
        empty = network.build()
    for fresh in (network.model(seed=7), empty):
        small = Plan.from_json(loaded["plan"]).shrink(fresh)
        small.load_state_dict(loaded["model"], assign=True)
        assert same(small, twins.small)
        small.eval()
        args, kwargs = twins.call
        assert torch.equal(small(*args, **kwargs), twins.small.eval()(*args, **kwargs))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet", "unet", "vit", "group-norm", "fused-qkv"])
def test_export(name):
    twins = twins_of(BY_NAME[name], torch.float32)
    small = twins.small.eval()
    program = torch.export.export(small, twins.call[0])
    assert torch.allclose(program.module()(*twins.call[0]), small(*twins.call[0]), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in program.parameters()) == twins.plan.after.parameters


@pytest.mark.parametrize("name", ["resnet18", "unet", "vit"])
def test_onnx(name):
    reference = pytest.importorskip("onnx.reference", reason="ONNX export needs onnx")
    pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript")
    twins = twins_of(BY_NAME[name], torch.float32)
    small = twins.small.eval()
    program = torch.onnx.export(small, twins.call[0], dynamo=True, verbose=False)
    session = reference.ReferenceEvaluator(program.model_proto)
    given = {name: t.numpy() for name, t in zip(session.input_names, twins.call[0], strict=True)}
    out = torch.from_numpy(session.run(None, given)[0])
    want = small(*twins.call[0]).detach()
    assert (out - want).abs().max() <= 1e-4 * want.abs().max()


def test_what_it_says():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 1:4] = False
    plan = prospr.channels.plan(net, {"2.weight": mask}, torch.zeros(1, 4))
    assert plan.keep == {"0.weight": {0: [0, 4, 5]}, "0.bias": {0: [0, 4, 5]}, "2.weight": {1: [0, 4, 5]}}
    assert str(plan).splitlines() == [
        "tensor      before        after",
        "0.weight       6x4          3x4",
        "2.weight       2x6          2x3",
        "parameters      44  23 (52.27%)",
        "channels         8   5 (62.50%)",
        "flops           72  36 (50.00%)",
    ]


# Other networks, damaged files, hostile files


def test_another_network():
    plan = twins_of(BY_NAME["resnet20-a"]).plan
    with pytest.raises(PlanError, match=r"conv1\.weight: the plan is for a tensor of shape \(4, 3, 3, 3\), and this"):
        plan.shrink(prospr.lab.models.resnet20(width=8))
    with pytest.raises(PlanError, match=r"conv1\.weight: Linear has no such tensor; this plan is for another network"):
        plan.shrink(nn.Linear(3, 3))
    small = plan.shrink(BY_NAME["resnet20-a"].model())
    with pytest.raises(PlanError, match=r"shrink the network as it was before"):
        plan.shrink(small)
    more = BY_NAME["resnet20-a"].model()
    more.extra = nn.Linear(3, 3)
    with pytest.raises(PlanError, match=r"extra\.weight: the plan does not know this tensor"):
        plan.shrink(more)
    other = BY_NAME["resnet20-a"].model()
    other.layer2[0].downsample.pad = nn.Identity()
    with pytest.raises(PlanError, match=r"downsample\.pad\.padding: the plan sets it to .*, and it is None here"):
        plan.shrink(other)


def content() -> dict:
    return json.loads(twins_of(BY_NAME["mobilenet"]).plan.to_json())


def damage(*path, value) -> str:
    plan = content()
    place = plan
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"plan"',
        "[" * 100_000,
        "{}",
        damage("format", value="other"),
        damage("version", value=2),
        damage("indices", value=None),
        damage("indices", value=[]),
        damage("indices", 0, value=[]),
        damage("indices", 0, value=[1, 0]),
        damage("indices", 0, value=[1, 1]),
        damage("indices", 0, value=[0.0]),
        damage("indices", 0, value=[True]),
        damage("indices", 0, value=["0"]),
        damage("indices", 0, value=[-1]),
        damage("indices", 0, value=[10**6]),
        damage("indices", 0, value="01"),
        damage("indices", 0, value={"0": 1}),
        damage("keep", value=[1]),
        damage("keep", "stem.0.weight", value={"7": 0}),
        damage("keep", "stem.0.weight", value={"-1": 0}),
        damage("keep", "stem.0.weight", value={"x": 0}),
        damage("keep", "stem.0.weight", value={"0": -1}),
        damage("keep", "stem.0.weight", value={"0": None}),
        damage("keep", "no.such.weight", value={"0": 0}),
        damage("shapes", value=None),
        damage("shapes", "stem.0.weight", value="4"),
        damage("shapes", "stem.0.weight", value=[4, -3, 3, 3]),
        damage("shapes", "stem.0.weight", value=[4.5, 3, 3, 3]),
        damage("attributes", value=[1]),
        damage("attributes", "", value=3),
        damage("attributes", "", value={"forward": 1}),
        damage("attributes", "", value={"__class__": 1}),
        damage("attributes", "", value={"training": True}),
        damage("attributes", "stem.0", value={"groups": "1"}),
        damage("attributes", "stem.0", value={"groups": True}),
        damage("attributes", "stem.0", value={"groups": -1}),
        damage("attributes", "stem.0", value={"groups": {"a": 1}}),
        damage("attributes", "stem.0", value={"padding": [1.5]}),
        damage("before", value={}),
        damage("before", value={"parameters": 1, "channels": 1, "flops": 1, "more": 1}),
        damage("after", value={"parameters": 1.5, "channels": 1, "flops": 1}),
        damage("after", value=None),
    ],
    ids=lambda text: f"{len(text)}",
)
def test_a_damaged_or_hostile_plan(text):
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        damage("attributes", "no.such", value={"groups": 1}),
        damage("attributes", "", value={"groups": 1}),
        damage("attributes", "stem.0", value={"groups": [1]}),
        damage("attributes", "stem.0", value={"padding": 1}),
        damage("attributes", "stem.0", value={"padding": [1, 1, 1]}),
        damage("attributes", "avgpool", value={"padding": 1}),
    ],
    ids=lambda text: f"{len(text)}",
)
def test_attributes_that_do_not_fit_the_network(text):
    with pytest.raises(PlanError, match=r"this plan is for another network"):
        Plan.from_json(text).shrink(BY_NAME["mobilenet"].model())


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "plan").write_bytes(bytes(range(256)))
    with pytest.raises(PlanError, match="this is no plan"):
        Plan.load(tmp_path / "plan")


def test_a_plan_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    plan = twins_of(BY_NAME["tied"]).plan
    plan.save(tmp_path / "plan")
    before = (tmp_path / "plan").read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plan.save(tmp_path / "plan")
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    assert (tmp_path / "plan").read_text() == before


def test_shrinking_leaves_the_network_as_it_was():
    twins = twins_of(BY_NAME["mobilenet"])
    before = copy.deepcopy(twins.masked)
    twins.plan.shrink(twins.masked)
    assert same(before, twins.masked)
    assert [m.extra_repr() for m in before.modules()] == [m.extra_repr() for m in twins.masked.modules()]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_whose_state_has_another_shape_are_refused(kind):
    x = torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = kind(net.parameters())

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    masks = prospr.prune(net, None, 0.5, method="magnitude", granularity="channel", example=x)
    how = prospr.channels.plan(net, masks, x)
    with pytest.raises(PlanError, match=f"{kind.__name__} has a state .* make a new optimizer"):
        how.optimizer(optimizer, net, how.shrink(net))
