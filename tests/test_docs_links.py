# SPDX-License-Identifier: Apache-2.0
"""Links between the pages lead to a file and a heading, on GitHub and in the built site alike."""

import re
import urllib.parse
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, named

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def list_anchors(path: Path) -> set[str]:
    """The anchors of headings that GitHub and MkDocs make alike.

    MkDocs joins the hyphens that GitHub keeps, such as those of "python -m".
    """
    anchors = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        if "--" not in anchor:
            anchors.add(anchor)
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_a_page_and_heading(page):
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        path = (page.parent / urllib.parse.unquote(target)).resolve() if target else page
        assert path.exists(), f"{named(page)}: there is no {target}"
        assert path.is_relative_to(ROOT), f"{named(page)}: {target} is outside the project"
        if anchor and path.suffix == ".md":
            assert anchor in list_anchors(path), f"{named(page)}: {target} has no #{anchor}"
