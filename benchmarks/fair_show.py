"""What `fair.py --show` prints and draws of the runs in a file: means and differences, weights by layer, a figure."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import prospr
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.results import Row, means, setups_of
from prospr.lab.runs.making import network
from prospr.lab.show import show_table

CIFAR10 = {"image": [3, 32, 32], "num_classes": 10}  # what the first lines were measured on, which do not say it


def table(lines: Sequence[dict], baseline: str) -> str:
    """Mean, deviation and number of runs of every arm and sparsity, and the difference to `baseline`, paired by seed;
    of what was trained smaller, its mean parameters and FLOPs too. A table a network, number of epochs and split."""
    found = []
    for title, rows in _setups(lines):
        sizes = {line["run"]: line.get("sizes", {}) for line in lines}
        compared = baseline if any(row.method == baseline for row in rows) else None
        shown = []
        for cell in means(rows, compared):
            arm, share = cell["method"], cell["sparsity"]
            said = {"arm": arm, "sparsity %": "-" if share is None else f"{100 * share:g}"}
            said |= {"mean %": _percent(cell["mean"]), "sd": _percent(cell["sd"])}
            said |= {"n": cell["n"], "failed": cell["failed"]}
            if compared is not None:
                said[f"minus {compared}"] = "" if cell["difference"] is None else f"{100 * cell['difference']:+.2f}"
                said["verdict"] = cell["verdict"] or ""
            if any(_shrunk(sizes[row.run]) for row in rows):
                these = [row.run for row in rows if row.method == arm and share in (None, row.sparsity)]
                said |= _mean_sizes([sizes[run] for run in these if sizes[run]])
            shown.append(said)
        found.append(f"{title}\n{show_table(shown)}")
    return "\n\n".join(found) or "nothing is measured yet"


def densities(lines: Sequence[dict], arms: Sequence[str] | None = None, shares: Sequence[float] | None = None) -> str:
    """How many weights each layer keeps, the mean of the runs; a table a sparsity, of all `arms` or of these."""
    by_run, found = {line["run"]: line for line in lines}, []
    for title, rows in _setups(lines):
        pruned = [row for row in rows if row.layers and (not arms or row.method in arms)]
        for share in sorted({row.sparsity for row in pruned if not shares or row.sparsity in shares}):
            here = [row for row in pruned if row.sparsity == share]
            weights = weights_of(by_run[here[0].run])
            cells: dict[str, dict[str, float]] = {}
            for arm in dict.fromkeys(row.method for row in here):
                kept = [row.layers for row in here if row.method == arm]
                cells[f"{arm} ({len(kept)})"] = {
                    layer: fmean(one.get(layer, 1.0) * size for one in kept) for layer, size in weights.items()
                }
            shown = [
                {"layer": layer, "weights": size, **{arm: f"{cell[layer]:.0f}" for arm, cell in cells.items()}}
                for layer, size in weights.items()
            ]
            every = {arm: f"{sum(cell.values()):.0f}" for arm, cell in cells.items()}
            shown.append({"layer": "all", "weights": sum(weights.values()), **every})
            found.append(f"{title}, {100 * share:g} % sparse: weights kept, mean of (n) runs\n{show_table(shown)}")
    return "\n\n".join(found) or "no pruned network is measured yet"


def draw(lines: Sequence[dict], baseline: str, path: Path, arms: Sequence[str] | None = None) -> None:
    """Points above `baseline` at every sparsity: a mark a seed that both have, a line through their means."""
    from prospr.lab.figures.style import GREY, canvas, legend, looks, save, styled
    from prospr.lab.names import printed

    (title, rows), *others = _setups([line for line in lines if line["error"] is None])
    if others:
        raise SystemExit(f"--figure: these are of several setups ({title}; {others[0][0]}); give a file of one")
    reached = {(row.method, row.sparsity, row.seed): row.accuracy for row in rows if row.method != DENSE}
    shares = sorted({share for _, share, _ in reached})
    names = [arm for arm in dict.fromkeys(row.method for row in rows) if arm not in (baseline, DENSE)]
    with styled():
        figure, axes = canvas(5.2, 0.62)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=1, label=printed(baseline))
        for look, arm in zip(looks(names).values(), names, strict=True):
            found = {}
            for place, share in enumerate(shares):
                pairs = [
                    100 * (mine - reached[baseline, share, seed])
                    for (name, here, seed), mine in reached.items()
                    if (name, here) == (arm, share) and (baseline, share, seed) in reached
                ]
                if pairs and (not arms or arm in arms):
                    found[place] = fmean(pairs)
                    axes.plot([place] * len(pairs), pairs, look.mark, color=look.colour, markersize=2.5, alpha=0.5)
            if found:
                axes.plot(list(found), list(found.values()), zorder=3, **look.line)
        axes.set_xticks(range(len(shares)), [f"{100 * share:g}" for share in shares])
        axes.set_xlabel("sparsity, %")
        axes.set_ylabel(f"test accuracy above {printed(baseline)}'s, points")
        legend(figure, axes, 5.2)
        save(figure, path.suffix[1:], title, path)


def smaller(sizes: dict[str, Any]) -> str:
    """How small the network is that was trained, in words; nothing where it is as large as before."""
    if not _shrunk(sizes):
        return ""
    parameters, flops = sizes["trained_parameters"], sizes["trained_flops"]
    return (
        f"  {parameters:,} parameters ({100 * parameters / sizes['parameters']:.2f} %)"
        f"  {flops / 1e6:.1f} MFLOPs ({100 * flops / sizes['flops']:.2f} %)"
    )


def _setups(lines: Sequence[dict]) -> list[tuple[str, list[Row]]]:
    """Rows that can be compared, and what they have in common, in words. An arm is a method of its own."""
    names = {one.name for one in fields(Row)}
    named: list[dict[str, Any]] = [{**line, "method": line["arm"], "check": ""} for line in lines]
    rows = [Row(**{key: value for key, value in line.items() if key in names}) for line in named]
    return [(f"{network}, {dataset}, {setup}", here) for (dataset, network, setup), here in setups_of(rows).items()]


def weights_of(line: dict) -> dict[str, int]:
    """{layer: how many weights it has} of a line's network."""
    sizes = line.get("sizes", CIFAR10)
    model = network(Experiment.from_dict(line["experiment"]), sizes["num_classes"], sizes["image"][0])
    return {name: weight.numel() for name, weight in prospr.prunable(model).items()}


def _shrunk(sizes: dict[str, Any]) -> bool:
    return bool(sizes) and sizes["trained_parameters"] < sizes["parameters"]


def _mean_sizes(sizes: Sequence[dict[str, Any]]) -> dict[str, str]:
    if not sizes:
        return dict.fromkeys(("parameters", "parameters %", "MFLOPs", "FLOPs %"), "")
    parameters, flops = (fmean(one[f"trained_{name}"] for one in sizes) for name in ("parameters", "flops"))
    said = {"parameters": f"{parameters:.0f}", "parameters %": _percent(parameters / sizes[0]["parameters"])}
    return said | {"MFLOPs": f"{flops / 1e6:.1f}", "FLOPs %": _percent(flops / sizes[0]["flops"])}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
