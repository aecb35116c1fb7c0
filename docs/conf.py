"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import importlib
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


class CommandHelp(Directive):
    """What ``rpcdataloader COMMAND --help`` prints, asked of the command line itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from rpcdataloader.__main__ import COMMANDS

        module, _purpose = COMMANDS[self.arguments[0]]
        os.environ["COLUMNS"] = "82"
        os.environ["NO_COLOR"] = "1"
        text = importlib.import_module(module).make_parser().format_help()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
