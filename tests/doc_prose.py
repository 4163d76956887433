"""What was measured behind the running text of the README and docs/comparison.md: a function a paragraph.

The comment that ends such a paragraph, `<!-- results/gpt_cpu.jsonl says=gpt -->`, names the file and the function. It
gives every number of the paragraph, in order: what it should be by the runs, or, of a number that tells which runs are
meant, the number itself; None for one that was not measured here. A claim in words beside them is asserted.
"""

import json
import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from doc_tables import ROOT, having, load

RESNET20, VGG16 = "results/fair_resnet20.jsonl", "results/fair_vgg16.jsonl"
CHANNELS, TRAINING, GPT = "results/fair_structured.jsonl", "results/training_h200.json", "results/gpt_cpu.jsonl"
PERCEPTRON, GRAY = "results/small_mlp_cpu.jsonl", "results/small_mlp_cifar_cpu.jsonl"
FIVE = (73.8, 89.3, 95.6, 97.2, 98.2)
DATA_METHODS = ("snip", "synflow", "grasp", "force")
Said = list[float | None]


def whole(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def reached(path: str, arm: str, share: float, **fields: Any) -> dict[int, float]:
    """{seed: accuracy in percent}."""
    rows = having(load(path), arm=arm, sparsity=round(share / 100, 6), error=None, **fields)
    return {row["seed"]: 100 * row["accuracy"] for row in rows}


def ahead(path: str, arm: str, other: str, share: float) -> list[float]:
    """Of the seeds that both have: what `arm` has more than `other`."""
    mine, theirs = reached(path, arm, share), reached(path, other, share)
    return [mine[seed] - theirs[seed] for seed in mine if seed in theirs]


def shown(gaps: list[float]) -> bool:
    """Whether the 95 % interval of the mean leaves zero out (Student's t)."""
    t = {2: 12.706, 3: 4.303, 5: 2.776, 10: 2.262, 25: 2.064, 30: 2.045}[len(gaps)]
    return abs(fmean(gaps)) > t * stdev(gaps) / math.sqrt(len(gaps))


def dense() -> Said:
    (run,) = (one["accuracy"] for one in whole(TRAINING)["accuracy"] if one["accuracy"]["network"] == "resnet20")
    found = run["test_accuracy"]
    assert len(found) == 4
    return [run["epochs"], fmean(found), stdev(found)]


def resnet20() -> Said:
    most = max(fmean(ahead(RESNET20, "prospr", other, share)) for other in DATA_METHODS for share in FIVE)
    assert all(fmean(ahead(RESNET20, "prospr", other, share)) > 0 for other in DATA_METHODS for share in FIVE)
    over_ntk = {share: ahead(RESNET20, "prospr", "ntk-sap", share) for share in FIVE}
    assert [share for share, gaps in over_ntk.items() if fmean(gaps) < 0] == [97.2]
    assert not any(shown(gaps) for gaps in over_ntk.values())
    told = [shown(ahead(RESNET20, "prospr", other, share)) for other in DATA_METHODS for share in FIVE]
    high = FIVE[2:]
    assert all(fmean(ahead(RESNET20, other, "erk", share)) < 0 for other in DATA_METHODS for share in high)
    over_erk = [fmean(ahead(RESNET20, arm, "erk", share)) for arm in ("prospr", "ntk-sap") for share in high]
    low = [
        fmean(ahead(RESNET20, arm, "erk", share)) for arm in ("prospr", "ntk-sap", *DATA_METHODS) for share in FIVE[:2]
    ]
    lead = [most, sum(told), len(told)]
    return [*lead, 97.2, -fmean(over_ntk[97.2]), min(over_erk), max(over_erk), 95.6, *FIVE[:2], max(low)]


def vgg16() -> Said:
    means = {
        share: {arm: fmean(found.values()) for arm in ("prospr", "snip", "ntk-sap", "synflow") if (found := of(arm))}
        for share, of in ((share, lambda arm, share=share: reached(VGG16, arm, share)) for share in (89.3, 95.6, 98.2))
    }
    assert all(max(found, key=found.__getitem__) == "prospr" for found in means.values())
    over_snip = [ahead(VGG16, "prospr", "snip", share) for share in means]
    assert not any(shown(gaps) for gaps in over_snip)
    by = sorted(fmean(gaps) for gaps in over_snip)
    return [by[0], by[-1]]


def vgg19() -> Said:
    over_3sp = {share: ahead(CHANNELS, "prospr, channels", "3sp", share) for share in (80, 90, 95)}
    assert not any(shown(gaps) for gaps in over_3sp.values())
    fewer = []
    for share in over_3sp:
        theirs, ours = (
            fmean(row["sizes"]["trained_flops"] for row in having(load(CHANNELS), arm=arm, sparsity=share / 100))
            for arm in ("3sp", "prospr, channels")
        )
        fewer.append(100 * (1 - ours / theirs))
    gaps = {share: fmean(found) for share, found in over_3sp.items()}
    assert abs(gaps[95]) < 0.05
    return [-gaps[80], -gaps[90], 80, 90, 95, min(fewer), max(fewer)]


def gpt() -> Said:
    def losses(arm: str, tied: bool) -> list[float]:
        found = [row["loss"] for row in having(load(GPT), arm=arm, tied=tied, sparsity=0.9)]
        assert len(found) == 5
        return found

    untied = [losses(arm, tied=False) for arm in ("prospr", "random, balanced", "snip")]
    tied = [fmean(losses(arm, tied=True)) for arm in ("prospr", "random, balanced")]
    return [90, *(number for found in untied for number in (fmean(found), stdev(found))), *tied]


def steps() -> Said:
    worse = fmean(ahead(PERCEPTRON, "prospr", "prospr: shuffled", 99))
    plain, first, none = (f"prospr, not redrawn, {steps}" for steps in ("M = 10", "M = 10, first order", "M = 0"))
    found = {arm: reached(PERCEPTRON, arm, 99) for arm in (plain, none, "force", "prospr", first)}
    later = {arm: [by_seed[seed] for seed in range(5, 30)] for arm, by_seed in found.items()}  # the others chose M = 10
    gaps = {arm: [a - b for a, b in zip(later[plain], later[arm], strict=True)] for arm in (first, none)}
    assert all(map(shown, gaps.values()))
    assert 0.4 < fmean(gaps[first]) / fmean(gaps[none]) < 0.6
    gray = {arm: list(reached(GRAY, arm, 99).values()) for arm in (plain, none, "force", "prospr")}
    assert not shown(ahead(GRAY, plain, none, 99))
    assert shown(ahead(GRAY, "force", "prospr", 99))
    assert all(len(of) == 10 for of in gray.values())
    digits, other = ([[fmean(of[arm]), stdev(of[arm])] for arm in gray] for of in (later, gray))
    steps = [*digits[0], *digits[1], len(later[plain]), *other[0], *other[1]]
    return [99, worse, *steps, *digits[2], *digits[3], *other[2], *other[3]]


def elsewhere() -> Said:
    losses = gpt()
    untied, tied = losses[3] - losses[1], losses[-2] - losses[-1]
    assert min(untied, tied) > 0
    return [89.3, 95.6, 98.2, *vgg16(), 90, untied, tied]


def not_first() -> Said:
    perceptrons, missed = steps(), literature()
    digits, gray = (perceptrons[k] - perceptrons[k + 2] for k in (-8, -4))
    assert shown(ahead(GRAY, "force", "prospr", 99))
    assert shown(ahead(PERCEPTRON, "force", "prospr", 99))
    return [*vgg19()[:5], 99, digits, gray, *missed[-2:]]


def code() -> Said:
    return [*published()[4:6], 98.2]


def published() -> Said:
    arms = ("prospr, one shot, lr 0.1", "prospr-published", "snip", "prospr: shuffled")
    paper, code, snip, shuffled = (list(reached(RESNET20, arm, 98.2).values()) for arm in arms)
    assert len(paper) == len(code) == len(snip) == len(shuffled) == 3
    empty = {
        sum(not kept for kept in run["layers"].values())
        for run in having(load(RESNET20), arm="prospr-published", sparsity=0.982)
    }
    assert empty == {7, 8}
    said = [fmean(paper), stdev(paper), 98.2, 0.1, fmean(code), stdev(code), fmean(snip)]
    return [*said, fmean(shuffled), stdev(shuffled), 98.2]


def paper() -> Said:
    rows = load("src/prospr/lab/data_files/paper.csv")
    theirs = {row["sparsity"]: row["mean"] for row in having(rows, table="lth_cifar10_resnet20", method="ProsPr")}
    gaps = {share: fmean(reached(RESNET20, "prospr", share).values()) - theirs[share] for share in FIVE}
    met = [share for share in FIVE if gaps[share] < 0]
    return [
        *(theirs[share] for share in FIVE),
        max(-gaps[share] for share in met),
        *met,
        *list(gaps.values())[len(met) :],
    ]


def literature() -> Said:
    best = dict(zip(FIVE, (90.5, 87.9, 83.9, 81.3, 77.7), strict=True))
    missed = []
    for share in FIVE:
        both = [list(reached(path, "prospr", share).values()) for path in (RESNET20, "results/fair_resnet20b.jsonl")]
        assert [len(seeds) for seeds in both] == [3, 3]
        missed.append(best[share] - max(map(fmean, both)))
    return [*best.values(), min(missed), max(missed)]


def demo() -> Said:
    rows = [row for row in load("results/demo_cpu.csv") if row["method"] != "prospr-one-shot"]  # added to its runs
    assert {row["method"] for row in rows} == {"dense", "prospr", "snip", "magnitude", "random"}
    assert len({row["sparsity"] for row in rows if row["sparsity"]}) == 3
    return [len(rows)]


def many() -> Said:
    (run,) = having(load("results/scale_h200.json"), store="device", steps=100)
    assert (run["network"], run["batch"]) == ("resnet50", 256)
    return [run["batch"], run["seconds"], run["peak_gib"], None]


def step() -> Said:
    kernels = whole("results/narrow_h200.json")["training"]["by blocks of pixels"]
    (plain,) = (row["ms_per_step"] for row in having(load(TRAINING), network="resnet20", way="plain")[-1:])
    epochs, mean, deviation = dense()
    return [256, kernels["1"], kernels["8"], plain, epochs, mean, deviation, 4]


def rival() -> Said:
    rows = having(load("results/metagrad_cpu.json"), steps=30)
    ours, public = having(rows, engine="reverse"), having(rows, engine="public")
    ours_steps, public_steps = ([row["steps_time"] for row in found] for found in (ours, public))
    assert len(ours_steps) == 2
    return [30, fmean(row["peak_gib"] for row in ours), public[0]["peak_gib"], fmean(ours_steps), *sorted(public_steps)]


PARAGRAPHS = (
    *(dense, resnet20, elsewhere, not_first, code, vgg16, vgg19, gpt, steps, published, paper, literature),
    *(demo, many, step, rival),
)
SAID: dict[str, Callable[[], Said]] = {one.__name__: one for one in PARAGRAPHS}
