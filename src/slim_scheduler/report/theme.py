"""How figures look: one set of colours for light and dark pages, and a figure as a piece of inline SVG.

Figures are drawn in the light colours; on the page each becomes a CSS variable, so a figure follows the reader's
theme, and its texts are real text in the page's font.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# (light, dark) by CSS variable. Series colours keep a contrast of 3:1 with both pages and differ in lightness too.
COLORS = {
    "ink": ("#1b1f24", "#e6e9ee"),
    "soft": ("#5b6470", "#9aa4b2"),
    "line": ("#d5dae1", "#333a45"),
    "page": ("#fbfbfa", "#14171c"),
    "card": ("#fefefe", "#1b1f26"),
    "s0": ("#2563c9", "#6ea8ff"),
    "s1": ("#d2690e", "#ffa657"),
    "s2": ("#1f8a5b", "#55d394"),
    "s3": ("#a83f97", "#e58bd6"),
    "s4": ("#0b7f91", "#46cfe0"),
    "s5": ("#bf3434", "#ff8a80"),
    "s6": ("#8a6d00", "#e0c04a"),
    "s7": ("#5f5aa8", "#b3adff"),
    "w0": ("#c6dbf2", "#24466e"),
    "w1": ("#8db8e3", "#3269a5"),
    "w2": ("#4a88c7", "#5b9be0"),
    "w3": ("#1d4f8f", "#a9d0ff"),
}
INK, SOFT, LINE, CARD = (COLORS[name][0] for name in ("ink", "soft", "line", "card"))
SERIES = tuple(COLORS[f"s{i}"][0] for i in range(8))
WIDTH_RAMP = tuple(COLORS[f"w{i}"][0] for i in range(4))
DASHES: tuple[str, ...] = ("-", "--", "-.", ":")
MARKERS = "os^Dvp*P"  # beside the colours, one each
FIGURE_SIZE = (5.4, 3.5)  # inches: text stays readable when a phone shrinks it to its width

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # 67.724, not 0.004 and "+6.772e1" beside the axis
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.8,
}


def series(i: int) -> tuple[str, str]:
    """Colour and dash of the i-th of several lines: distinct beyond the number of colours, and without colour."""
    return SERIES[i % len(SERIES)], DASHES[(i // len(SERIES) + i) % len(DASHES)]


def marker(i: int) -> str:
    """The i-th point's shape."""
    return MARKERS[i % len(MARKERS)]


def width_color(i: int, widths: int) -> str:
    """The i-th narrowest of some widths: the wider, the stronger."""
    last = len(WIDTH_RAMP) - 1
    return WIDTH_RAMP[round(i * last / max(widths - 1, 1))]


@contextmanager
def drawing(height: float | None = None) -> Iterator[Figure]:
    """A figure in this style, drawn without any screen."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(FIGURE_SIZE[0], height or FIGURE_SIZE[1]), layout="constrained")


def inline_svg(figure: Figure, title: str, salt: str) -> str:
    """The figure as an SVG element for a page; `salt` keeps its ids apart from other figures'."""
    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">', svg
    )
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    svg = re.sub(r'\b(id="|url\(#|href="#)(?=[\w-])', rf"\1{salt}-", svg)
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg


def css_variables(dark: bool) -> str:
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLORS.items())
