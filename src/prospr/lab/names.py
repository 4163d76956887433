"""Names as they are printed in figures and tables for a paper."""

from __future__ import annotations

import re

__all__ = ["printed", "slug"]

_PRINTED = {
    "3sp": "3SP",
    "erk": "ERK",
    "force": "FORCE",
    "grasp": "GraSP",
    "grasp-mb": "GraSP-MB",
    "iter-snip": "Iter-SNIP",
    "ntk-sap": "NTK-SAP",
    "phew": "PHEW",
    "prospr": "ProsPr",
    "prospr-first": "ProsPr (first order)",
    "prospr-iterative": "ProsPr (iterative)",
    "prospr-one-shot": "ProsPr (one shot)",
    "prospr-published": "ProsPr (published code)",
    "snip": "SNIP",
    "snip-mb": "SNIP-MB",
    "synflow": "SynFlow",
}


def printed(method: str) -> str:
    """A method's name with its capitals; what follows it, such as changed settings, stays.

    >>> printed("snip"), printed("prospr (steps=1)"), printed("dense")
    ('SNIP', 'ProsPr (steps=1)', 'Dense')
    """
    name = re.split(r"[\s,(]", method, maxsplit=1)[0]
    return _PRINTED.get(name, name[:1].upper() + name[1:]) + method[len(name) :]


def slug(text: str) -> str:
    """`text` as a part of a file's name.

    >>> slug("digits, epochs=1, lr=0.05")
    'digits-epochs-1-lr-0.05'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
