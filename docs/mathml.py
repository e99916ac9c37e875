"""Formulas as MathML, made when the pages are built: browsers show them without a script or a network."""

import re
from html import escape
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(formula: str, display: str) -> str:
    """MathML of a formula in TeX.

    Raises:
        ValueError: If a command is not known: the converter would show its name.
    """
    found = convert(formula, display=display)
    if unknown := re.findall(r"\\[a-zA-Z]+", found):
        raise ValueError(f"unknown commands: {', '.join(unknown)}")
    return found


def markup(node: nodes.Element, display: str) -> str:
    """What stands for a formula. One that cannot be converted is a warning, and stays as it is written."""
    try:
        return mathml(node.astext(), display)
    except Exception as error:  # the converter raises many kinds
        logger.warning(
            "cannot convert the formula %r: %r", node.astext(), error, location=node
        )
        return f"<code>{escape(node.astext())}</code>"


def visit_inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(f'<span class="math">{markup(node, "inline")}</span>')
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(f'<div class="math">{markup(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
