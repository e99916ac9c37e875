"""A figure that a notebook shows by itself; imports matplotlib, so it is imported where something is drawn."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure without pyplot, which would choose a backend for the process; its last line in a cell displays it."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()
