"""The questions that the report answers, in their order: the figure of each, what it shows, and what the paper says.

The paper is Qiu & Yao (arXiv 2510.04212). What it claims is measured in the runs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flashpoint.lab.report import figures
from flashpoint.lab.report.panel_grid import PanelGrid
from flashpoint.runs.metric_table import (
    OUT_BIAS_LARGEST,
    ROW_SUM_ABS_MEAN,
    SIGN_AGREEMENT,
    STEP_SIMILARITY,
    TIE_MULTIPLICITY,
    TIED_ROWS,
    TIES_ON_FIRST_KEYS,
    TOKEN_SIMILARITY,
    V_SIGN,
    W_Q_MEAN_KEY,
    W_Q_UPDATE_MEAN_KEY,
)
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Panel:
    """One figure of the report."""

    key: str
    """Part of the file's name."""
    question: str
    caption: str
    """What is drawn, and how to read it. It explains its symbols: the page stands alone."""
    paper: str
    """What Qiu & Yao say of it."""
    draw: Callable[[Sequence[Run]], PanelGrid | None]
    """Draws the figure; returns None if no run has measured its metric."""


_TIES = (TIED_ROWS, TIE_MULTIPLICITY, TIES_ON_FIRST_KEYS)
_SIGNS = (SIGN_AGREEMENT, OUT_BIAS_LARGEST, V_SIGN)
_SIMILARITY = (TOKEN_SIMILARITY, STEP_SIMILARITY)
_NULL_DIRECTION = (W_Q_MEAN_KEY, W_Q_UPDATE_MEAN_KEY, ROW_SUM_ABS_MEAN)

PANELS = (
    Panel(
        "loss",
        "Does the loss explode, and when?",
        "Above the training loss, below the gradient norm of each step before clipping, on a logarithmic axis. "
        "In an explosion both rise. Several runs differ in the marks on their curves, too.",
        "The paper shows both: the failure, and a fix that holds.",
        figures.draw_losses,
    ),
    Panel(
        "layers",
        "Which layer's W_Q takes off?",
        "W_Q makes the queries. Drawn is its spectral norm, the largest singular value, of each layer's largest head, "
        "on a logarithmic axis. Red is the layer with the largest at the onset, or at the end of a run without one. "
        "The others go from dark, the first, to light, the last.",
        "In the paper it is the second layer.",
        figures.draw_layers,
    ),
    Panel(
        "heads",
        "Which heads of that layer take off?",
        "The spectral norm of W_Q of each head, on a logarithmic axis.",
        "In the paper it is a few of them.",
        figures.draw_heads,
    ),
    Panel(
        "heat_map",
        "When does each head of the model take off?",
        "A row is a head. It turns light where the spectral norm of its W_Q is large.",
        "In the paper it is a few heads of the second layer.",
        figures.draw_heat_map,
    ),
    Panel(
        "ties",
        "How often is P̄ exactly 1 more than once in a row?",
        "A row holds the scores of one query. P̄ is exp(score − shift), where the shift is mostly the row's largest "
        "score. So P̄ is 1 where a key has the largest score, and for other keys only if they tie with it. "
        "At a step at which no row has two, the middle and lower panels have no value.",
        "The paper: equal row maxima make several P̄ of a row exactly 1.",
        partial(figures.draw_metrics, metrics=_TIES, share=TIED_ROWS),
    ),
    Panel(
        "signs",
        "Where does the sign of δ's error come from?",
        "δ is what the backward pass subtracts in a row: the sum of dO∘O, in which dO is the gradient of the output O. "
        "The error of O is its own minus that of an output in FP32. Above: from −1 to 1; above 0 the two mostly agree, "
        "which makes the error of δ positive. Middle: 0 is an error without bias, 1 an error of one sign. "
        "Below: from ½, as many of either sign, to 1, all of one sign.",
        "The paper: the product of P̄ and V is rounded with a bias, and in some features dO has the sign of that error.",
        partial(figures.draw_metrics, metrics=_SIGNS),
    ),
    Panel(
        "cumulative",
        "Does the error of δ keep its sign?",
        "The error is δ as the run computes it minus δ from an output in FP32, summed over the observed tokens and "
        "steps, in the unit of δ. A curve that goes on rising is an error that stays positive.",
        "The paper: the sum is positive.",
        figures.draw_cumulative,
    ),
    Panel(
        "bias",
        "In which layer is δ biased, if the rounding of P̄ counts, too?",
        "The error is δ minus the δ with which each row of the score gradient dS sums to zero, as it does in exact "
        "arithmetic. Its unit is |dO||O|, the product of two norms. Drawn is the mean over a layer's heads, "
        "summed over the observed steps. If one curve goes over ten times as far as the median one, the axis is "
        "logarithmic beyond the latter. Red is the layer of the largest W_Q; the others go from dark, the first, to "
        "light, the last. A curve ends early, with a cross, where one of the layer's heads has no such δ: all "
        "probabilities P of a row are 0 there, so that its dS sums to zero with any δ, or δ is no longer a number.",
        "The paper takes δ of an output in FP32 as exact instead.",
        figures.draw_bias,
    ),
    Panel(
        "similarity",
        "Do all tokens and steps push W_Q the same way?",
        "An error of a token's δ changes the gradient of W_Q along one direction, (PK)[T]ᵀX[T]: the mean key that "
        "the token attends to, times the token's input. Cosine 1: all directions are one. Cosine 0: they have nothing "
        "in common.",
        "The paper: these matrices of rank one are much alike over tokens and steps.",
        partial(figures.draw_metrics, metrics=_SIMILARITY),
    ),
    Panel(
        "null_direction",
        "Does W_Q grow along what all keys share?",
        "The mean key is the mean of a head's keys over the tokens. Above and middle: 0 is none of W_Q, 1 all of it. "
        "Below: what is left of the sum of a row of the score gradient dS, which is 0 in exact arithmetic.",
        "Not in the paper: a hypothesis of this project.",
        partial(figures.draw_metrics, metrics=_NULL_DIRECTION),
    ),
    Panel(
        "scores",
        "Do the scores take on an offset that softmax does not see?",
        "The mean size of the scores S, on a logarithmic axis. Growth along the mean key adds the same number to "
        "all scores of a row, which softmax ignores. BF16 then resolves their differences less.",
        "Not in the paper.",
        figures.draw_scores,
    ),
    Panel(
        "max_logits",
        "Does softmax see one key alone?",
        "The max attention logit of each head: the size of the largest score S, on a logarithmic axis. Where scores of "
        "a row lie tens apart, softmax gives nearly all weight to one key, and the gradients of the others vanish.",
        "Not in the paper. A threshold of 100 is that of QK-clip (Kimi K2, arXiv 2507.20534).",
        figures.draw_max_logits,
    ),
)
