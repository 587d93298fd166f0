"""Draw docs/pareto.svg, KL divergence over size of GGUF files, from the table of docs/benchmarks.md.

    python scripts/draw_pareto.py

The points are the calibrated files of `smollm2-768` that stand in the table; the same table gives the same bytes.
"""

import math
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
SERIES = {"llama-quantize, imatrix": "#d1702b", "**llmcompress, calibrated**": "#2f7fd1"}
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 58, 56
SIZES = (64, 196)  # MB
NEAR = 30  # points so near to the next have their words on the other side
LOSSES = (0.004, 14.0)  # nats
INK = "#7d8590"  # told from white and from black alike
Point = tuple[str, float, float]


def points(text: str) -> dict[str, list[Point]]:
    """Type, MB and KL of each file, by series, by size."""
    table = text.split("\n`smollm2-768` (rotated", 1)[1].split("\nFloats of 4 bits", 1)[0]
    found: dict[str, list[Point]] = {name: [] for name in SERIES}
    for kind, name, nbytes, loss in re.findall(r"^\| (\w+) \| (.*?) \| ([\d,]+) \| ([\d.]+) ±", table, re.MULTILINE):
        if name in found:
            found[name].append((kind, int(nbytes.replace(",", "")) / 1e6, float(loss)))
    return {name: sorted(series, key=lambda point: point[1:]) for name, series in found.items()}


def across(megabytes: float) -> float:
    """The place of a size."""
    low, high = SIZES
    return LEFT + (megabytes - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def down(loss: float) -> float:
    """The place of a KL divergence, on a logarithmic axis."""
    low, high = map(math.log, LOSSES)
    return TOP + (high - math.log(loss)) / (high - low) * (HEIGHT - TOP - BOTTOM)


def label(x: float, y: float, text: str, fill: str = INK, anchor: str = "middle", size: int = 13) -> str:
    """A word of the drawing."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{text}</text>'


def axes() -> list[str]:
    """Lines and figures of both axes."""
    lines = []
    for loss in (0.01, 0.1, 1, 10):
        y = down(loss)
        lines.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
        lines.append(label(LEFT - 8, y + 4.5, f"{loss:g}", anchor="end"))
    lines += [label(across(size), HEIGHT - BOTTOM + 22, str(size)) for size in range(80, 200, 20)]
    lines.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM} H{WIDTH - RIGHT}" stroke="{INK}"/>')
    lines.append(label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "size of the file, MB"))
    lines.append(label(14, 22, "KL divergence from float16, nats (lower is better)", anchor="start"))
    return lines


def drawn(name: str, series: list[Point], place: int) -> list[str]:
    """A series: its line, its points, the types below or above them, and its name."""
    colour, said = SERIES[name], name.strip("*")
    best = [point for number, point in enumerate(series) if all(point[2] < other[2] for other in series[:number])]
    path = " ".join(f"{across(size):.1f},{down(loss):.1f}" for _, size, loss in best)
    lines = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>']
    for number, (kind, size, loss) in enumerate(series):
        x, y = across(size), down(loss)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        crowded = number + 1 < len(series) and across(series[number + 1][1]) - x < NEAR
        if name.startswith("llama") != crowded:
            lines.append(label(x + 8, y - 5, kind, colour, "start", 11))
        else:
            lines.append(label(x - 8, y + 15, kind, colour, "end", 11))
    x = LEFT + 16 + 250 * place
    lines.append(f'<circle cx="{x}" cy="40" r="4.5" fill="{colour}"/>')
    lines.append(label(x + 12, 44.5, said, colour, "start"))
    return lines


def svg(text: str) -> str:
    """The drawing of the table in a document."""
    series = points(text)
    parts = [*axes(), *(line for place, name in enumerate(SERIES) for line in drawn(name, series[name], place))]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    title = (
        '<title id="t">KL divergence over size of GGUF files of smollm2-768: llmcompress below llama-quantize</title>'
    )
    return "\n".join([head, title, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "pareto.svg").write_text(svg((DOCS / "benchmarks.md").read_text(encoding="utf-8")), encoding="utf-8")
