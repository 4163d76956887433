import math

import pytest
import torch
from torch.nn import functional as F

import prospr
from prospr.lab.data import digits
from prospr.lab.models import build
from prospr.lab.tasks import classification, dice_loss, segmentation


def test_ranks_are_those_of_topk():
    logits = torch.randn(500, 12)
    labels = torch.randint(0, 12, (500,))
    best = logits.topk(5).indices == labels.unsqueeze(1)
    seen = classification().figures(classification().count(logits, labels))
    assert seen == {"accuracy": best[:, 0].sum().item() / 500, "top5": best.any(1).sum().item() / 500}


def test_equal_outputs_rank_by_position_and_nan_is_never_right():
    count = classification().count
    assert count(torch.zeros(7, 7), torch.arange(7)).tolist() == [7, 1, 5]
    assert count(torch.full((7, 7), torch.nan), torch.arange(7)).tolist() == [7, 0, 0]
    assert count(torch.tensor([[0.0, torch.nan], [1.0, 0.0]]), torch.tensor([0, 0])).tolist() == [2, 1, 2]


def test_fewer_than_five_classes():
    assert classification().count(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])).tolist()[2] == 4


def test_overlap_by_hand():
    targets = torch.tensor([[[0, 0, 1], [1, 2, -1]], [[0, 0, 0], [0, 0, 0]]])
    given = torch.tensor([[[0, 1, 1], [1, 2, 2]], [[0, 0, 0], [0, 0, 2]]])
    task = segmentation(4)
    counts = task.count(F.one_hot(given, 4).permute(0, 3, 1, 2).float(), targets)
    assert counts.view(4, 4).tolist() == [[6, 1, 1, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    ious = [6 / 8, 2 / 3, 1 / 2]  # the fourth class is nowhere
    assert task.figures(counts) == {
        "mean_iou": pytest.approx(sum(ious) / 3),
        "pixel_accuracy": pytest.approx(9 / 11),
    }


def test_counts_are_exact_under_bfloat16():
    outputs = torch.stack([torch.zeros(1, 100, 101), torch.ones(1, 100, 101)], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert segmentation(2).count(outputs, torch.ones(1, 100, 101, dtype=torch.long)).tolist() == [0, 0, 0, 10100]


def test_dice_by_hand():
    outputs = torch.tensor([[[[0.0, 0.0]], [[0.0, math.log(3)]]]])  # shares of class 1: 1/2, 3/4
    loss = dice_loss(outputs, torch.tensor([[[0, 1]]]))
    first, second = 2 * 0.5 / (0.75 + 1), 2 * 0.75 / (1.25 + 1)
    assert loss.item() == pytest.approx(1 - (first + second) / 2, abs=1e-5)
    unknown = dice_loss(outputs, torch.tensor([[[0, -1]]]))
    assert unknown.item() == pytest.approx(1 - (2 * 0.5 / 1.5) / 2, abs=1e-5)


@pytest.mark.parametrize("loss", ["cross-entropy", "dice"])
def test_a_pixel_without_a_target_has_no_gradient(loss):
    outputs = torch.randn(1, 3, 2, 2, requires_grad=True)
    targets = torch.tensor([[[0, 1], [2, -1]]])
    segmentation(3, loss).criterion(outputs, targets).backward()
    assert (outputs.grad[..., 1, 1] == 0).all()
    assert (outputs.grad[..., 0, 0] != 0).all()


def test_a_tasks_loss_is_what_prune_takes():
    data = digits().train
    batches = [(data.images[i : i + 64], data.labels[i : i + 64]) for i in (0, 500, 900)]
    model, other = (build("small_convnet", seed=0) for _ in range(2))
    masks = prospr.prune(model, batches, 0.8, method="snip", loss=classification().loss)
    assert masks == prospr.prune(other, batches, 0.8, method="snip")


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="unknown loss 'focal' for segmentation; known: cross-entropy, dice"):
        segmentation(2, "focal")
    with pytest.raises(ValueError, match="num_classes is 1; background is a class"):
        segmentation(1)
