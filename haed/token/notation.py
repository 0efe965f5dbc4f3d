"""How hierarchies and scales are written: 2@1 8@4 2@1 of an Hourglass, 2@16 2@4 4@1 of models with several scales.

Commas may stand between entries, and parentheses, nested or not, around them (Nawrot et al. 2021, section 3).
"""

import itertools
import re
from dataclasses import dataclass

from haed.system import Cut

MOST = 1024  # layers of a level, as of any other stack
NUMBER, WINDOW = r"[0-9]{1,6}", r"[0-9]{1,9}:[0-9]{1,9}"
_EXAMPLES = {NUMBER: "2@16 2@4 4@1", WINDOW: "256:512@16 8:256@4 0:8@1"}


def entries(text: str) -> list[str]:
    """The entries of a notation; where parentheses do not match, they stay a part of the entries, which are none then."""
    depths = [0, *itertools.accumulate((letter == "(") - (letter == ")") for letter in text)]
    matched = min(depths) == depths[-1] == 0
    return re.sub(r"[,()]" if matched else ",", " ", text).split()


@dataclass(frozen=True)
class Scale:
    """One level of a hierarchy: tokens of a position; layers before the coarser levels and after them."""

    factor: int
    before: int
    after: int


def parse_hierarchy(text: str, longest: int) -> list[Scale]:
    """Scales from the finest to the coarsest of a hierarchy such as "2@1 1@2 4@4 1@2 2@1", also with commas and parentheses.

    Args:
        text: layers@factor from the input to the output.
        longest: tokens of the longest window.

    Raises:
        ValueError: it is none, does not nest, has no layers, or shortens by more than a window.
    """
    where = f"model.hourglass.hierarchy={text!r}"
    found = entries(text)
    if not found or not all(re.fullmatch(rf"{NUMBER}@[1-9][0-9]{{0,6}}", entry) for entry in found):
        raise ValueError(f"{where}: entries are layers@factor; set something like 2@1 8@4 2@1")
    layers, factors = zip(*((int(number) for number in entry.split("@")) for entry in found), strict=True)
    if max(layers) > MOST:
        raise ValueError(f"{where}: a level has {MOST:,} layers at most")
    middle = len(factors) // 2
    down = factors[: middle + 1]
    if factors != factors[::-1] or len(factors) % 2 == 0:
        raise ValueError(
            f"{where}: factors must rise to one in the middle and fall likewise; set something like 2@1 8@4 2@1"
        )
    if down[0] != 1:
        raise ValueError(f"{where}: the first factor must be 1; set 0@1 {' '.join(found)} 0@1 for no layers there")
    for fine, coarse in zip(down, down[1:], strict=False):
        if coarse % fine or coarse == fine:
            raise ValueError(
                f"{where}: {coarse} is no larger multiple of {fine}; each factor must be one of the factor before it"
            )
    if not any(layers):
        raise ValueError(
            f"{where}: no scale has a layer, and no token would see another; set something like 2@1 8@4 2@1"
        )
    if down[-1] > longest:
        raise ValueError(
            f"{where}: factor {down[-1]} is more than the {longest} tokens of a window; set a smaller one, or more batch.context"
        )
    backwards = layers[::-1]
    return [Scale(factor, layers[i], backwards[i] if i < middle else 0) for i, factor in enumerate(down)]


def parsed(notation: str, option: str, what: str) -> dict[int, str]:
    """Reads such as 2@16 2@4 4@1: what stands before each @, by scale.

    Args:
        notation: as given by the user.
        option: its name, for errors.
        what: a pattern of what stands before each @, `NUMBER` (of layers, or of heads) or `WINDOW`.

    Raises:
        ValueError: it is not written so, a scale is there twice, or a number is none or too large.
    """
    found: dict[int, str] = {}
    given, example = f"{option}={notation!r}", f"set something like {_EXAMPLES[what]}"
    for part in (parts := entries(notation)):
        match = re.fullmatch(rf"({what})@([1-9][0-9]{{0,6}})", part)
        if match is None:
            raise ValueError(f"{given}: {part!r} does not say what is at which scale; {example}")
        if int(match[2]) in found:
            raise ValueError(f"{given}: scale {match[2]} is there twice; {example}")
        if what == NUMBER and not 1 <= int(match[1]) <= MOST:
            raise ValueError(
                f"{given}: {part} must be from 1 to {MOST:,} at scale {match[2]}, or be left out; {example}"
            )
        found[int(match[2])] = match[1]
    if not parts:
        raise ValueError(f"{given}: no scale is there; {example}")
    return found


def per_scale(notation: str, option: str, what: str, cut: Cut, to_tokens: bool = True) -> dict[int, str]:
    """What is `parsed`, from the coarsest scale to 1, the tokens themselves, or, unless it must go so far, to a coarser one.

    Raises:
        ValueError: as there, or the scales do not nest, end with 1, or fit into a window of the corpus cut so.
    """
    found = parsed(notation, option, what)
    scales, window, given = sorted(found, reverse=True), cut.context * cut.k, f"{option}={notation!r}"
    if to_tokens and scales[-1] != 1:
        raise ValueError(
            f"{given}: the finest scale must be 1, the tokens; add something like {_EXAMPLES[what].split()[-1]}"
        )
    for coarse, fine in itertools.pairwise(scales):
        if coarse % fine:
            raise ValueError(f"{given}: {fine} does not divide {coarse}; set scales of which each divides the next")
    if scales[0] > window:
        raise ValueError(
            f"{given}: a window has {window} tokens (batch.context × chunker.k); set scales up to that, or longer windows"
        )
    return {scale: found[scale] for scale in scales}
