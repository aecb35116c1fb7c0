"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "rpcdataloader"
author = "the rpcdataloader developers"
project_copyright = author
version = release = re.findall(r'^__version__ = "(.+)"$', (ROOT / "rpcdataloader/__init__.py").read_text(), re.M)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The tables in figures are parts of other pages.
exclude_patterns = ["_build", "figures/*.md"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Signatures of a dozen arguments are read one per line.
maximum_signature_line_length = 88
html_theme = "furo"
html_title = f"rpcdataloader {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]


class LaunchHelp(Directive):
    """What ``python -m rpcdataloader.launch --help`` prints, asked of the command line itself."""

    def run(self) -> list[nodes.Node]:
        from rpcdataloader.launch import make_parser

        os.environ["COLUMNS"] = "82"
        os.environ["NO_COLOR"] = "1"
        text = make_parser().format_help()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("launch-help", LaunchHelp)
    return {"parallel_read_safe": True}
