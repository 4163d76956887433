"""Every Python example of the README and the docs runs as written."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {}
    for block in blocks:  # a page's blocks follow one another
        exec(compile(block, str(page), "exec"), namespace)
    if page.parent == ROOT:
        assert len(blocks) == 4
        assert (tmp_path / "masks.safetensors").exists()
        assert " 294 " in capsys.readouterr().out  # 5 % of 20 x 256 + 256 x 3 weights, in the printed table
        assert int(namespace["model"][0].weight.count_nonzero() + namespace["model"][2].weight.count_nonzero()) == 589


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
