"""Branches of somebody's own training loop: a function of the user's trains them, with attentions that it is handed.

The function is ``step(checkpoint, attention, steps, watch)``. It loads the checkpoint, gives each layer its attention,
and trains so many steps on the batches that followed the checkpoint, in a loop that ``watch`` watches. One stands in
docs/localize.md.
"""

from __future__ import annotations

import contextlib
import glob
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flashpoint.errors import UserError, one_line
from flashpoint.files import file_sha256, folder_sha256
from flashpoint.lab.localize.engine import SECOND_TWIN, TWIN, engine, packaged
from flashpoint.lab.localize.mixture import LayerOf, Mixture, mixed
from flashpoint.lab.localize.subject import Cells, Trained, as_options, selection
from flashpoint.numerics.shared_graphs import forget_graphs
from flashpoint.runs.comparison import batches_of
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import LOSS, W_Q_NORM
from flashpoint.runs.run import Run
from flashpoint.runs.subfolders import log_of_branch
from flashpoint.user_code import file_digest, load, undisturbed
from flashpoint.watching.loop import Watch, watch

IN_ITS_PLACE = ("flash_fp32", "flash_unrounded_out", "flash_delta_fp32", "flash_exact_rowsum")
"""Attentions that are tried everywhere in the place of the run's: what they round tells what its rounding does."""


@dataclass(frozen=True)
class OwnLoop:
    """A :class:`~flashpoint.lab.localize.subject.Subject`.

    Attributes:
        folder: of a watched run.
        function: ``FILE.py:step``.
        attention: name of the run's.
        files: checkpoints, by the number of steps that were done.
    """

    folder: RunFolder
    function: str
    attention: str
    files: dict[int, str]

    @classmethod
    def of(cls, folder: RunFolder, function: str, pattern: str, attention: str | None) -> OwnLoop:
        """Find the checkpoints, and check that the function and the attention are there.

        Args:
            pattern: of the checkpoints' files or folders. The last number in a name is its step.
            attention: None is the one that the run was seen to use.

        Raises:
            UserError: something is not there.
        """
        files: dict[int, str] = {}
        for path in sorted(glob.glob(pattern)):
            if numbers := re.findall(r"\d+", Path(path).name):
                if (step := int(numbers[-1])) in files:
                    raise UserError(
                        f"--checkpoints {pattern}: {files[step]} and {path} have one step, {step:,}; give a pattern of "
                        "names that end with the step, and of one file each"
                    )
                files[step] = path
        if not files:
            raise UserError(f"--checkpoints {pattern}: no file there with a step in its name, e.g. step-001000.pt")
        load(function, f"--function {function}")
        run = Run.of_folder(folder)
        if run.config.model is None:  # nobody knows its layers and heads
            raise UserError(
                f"{folder.path}: its attention was not recorded; name it with "
                "flashpoint.watch(functions=['MODULE:NAME']) and watch the run again"
            )
        if LOSS.name not in run.columns:
            raise UserError(f"{folder.path}: has no losses; hand them to watched.step, and watch the run again")
        watched = {step: path for step, path in files.items() if run.first_step <= step < run.logged_steps}
        if not watched:
            raise UserError(
                f"--checkpoints {pattern}: of steps {min(files):,} to {max(files):,}, and {folder.path} was watched "
                f"from step {run.first_step:,} to {run.logged_steps:,}; a loop that goes on from a checkpoint says of "
                "which step: flashpoint.watch(first_step=STEP)"
            )
        seen = run.config.attn.name
        known = seen == "sdpa" or packaged(seen) is not None
        if attention is None and not known:
            raise UserError(f"{folder.path}: its attention is {seen}; name it with --attention FILE.py:FUNCTION")
        engine(attention or seen)
        return cls(folder, function, attention or seen, dict(sorted(watched.items())))

    @cached_property
    def run(self) -> Run:
        return Run.of_folder(self.folder)

    @property
    def checkpoints(self) -> list[int]:
        return list(self.files)

    @property
    def whole(self) -> Mixture:
        return Mixture(self.attention, self._twin)

    @property
    def twin(self) -> Mixture:
        return Mixture(self._twin, self._twin)

    @property
    def second_twin(self) -> Mixture:
        return Mixture(SECOND_TWIN + self.attention, SECOND_TWIN + self.attention)

    @property
    def divisible(self) -> bool:
        return True

    @property
    def _n_layer(self) -> int:
        return self.run.shape.n_layer

    @property
    def _twin(self) -> str:
        return TWIN + self.attention

    def only_in(self, cells: Cells) -> Mixture:
        return Mixture(self.attention, self._twin, *selection(cells))

    def changes(self) -> Iterator[tuple[str, Mixture]]:
        for name in IN_ITS_PLACE:
            if name != self.attention:
                yield f"{name} in its place", Mixture(name, self._twin)

    def describe(self, attention: Mixture) -> str:
        where = () if attention.layers is None else (as_options(attention.layers, attention.heads),)
        return " ".join((attention.inside, *where))

    def identity(self, attention: Mixture, start: int) -> str:
        files = {file_digest(word) for word in (self.function, self.attention)}
        return f"{self.function} {sorted(files)} {self._checkpoint_digest(start)} {sorted(asdict(attention).items())}"

    def _checkpoint_digest(self, start: int) -> str:
        """Return the digest of a checkpoint, a file or a folder; its name does not count. It is read once."""
        if start not in self._digests:
            path = Path(self.files[start])
            self._digests[start] = folder_sha256(path) if path.is_dir() else file_sha256(path)
        return self._digests[start]

    @cached_property
    def _digests(self) -> dict[int, str]:
        return {}

    def train(self, attention: Mixture, start: int, steps: int, folder: Path) -> Trained:
        forget_graphs()  # a function compiles so many times only, and once more for each branch
        step = load(self.function, f"--function {self.function}")
        handed = _Handed(attention, self._n_layer)

        def watching(model: nn.Module, **_options: object) -> Watch:
            """Watch a branch; the options that the loop gives its own watch are not for it."""
            return watch(
                model, runs_dir=folder.parent, name=folder.name, steps=steps, weights_interval=steps,
                interval=steps + 1, log_interval=min(10, steps), sequences=1,
                functions=[f"{mixed.__module__}:{mixed.__name__}"],
            )  # fmt: skip

        with (
            log_of_branch(folder).open("w", encoding="utf-8") as log,
            contextlib.redirect_stderr(log),
            contextlib.redirect_stdout(log),
        ):
            try:
                with undisturbed():
                    step(self.files[start], handed, steps, watching)
            except UserError:
                raise
            except (Exception, SystemExit) as error:  # one that calls sys.exit would end without a word
                traceback.print_exc(file=log)
                said = one_line(error) if isinstance(error, Exception) else f"sys.exit({error.code}); let it return"
                raise UserError(
                    f"--function {self.function}: {type(error).__name__} in a branch from step {start:,}: {said}; "
                    f"{log.name} tells where"
                ) from error
        trained = self._end(RunFolder(folder), handed.layers, start, steps)
        if attention == self.whole:
            self._check_first_loss(Run.of_folder(RunFolder(folder)), start)
        return trained

    def _check_first_loss(self, branch: Run, start: int) -> None:
        """Raise UserError where a branch with the run's own attention does not begin with the run's loss."""
        losses = dict(zip(*self.run.columns[LOSS.name], strict=True))
        if (run := losses.get(start)) is None:
            return
        found = float(branch.columns[LOSS.name][1][0])
        margin, share = self.run.config.detector.margin, 0.1 * abs(run)  # a sum over tokens has more noise
        margin = share if math.isnan(margin) else max(margin, share)
        if abs(found - run) > margin:
            raise UserError(
                f"--function {self.function}: with the run's attention step {start:,} has loss {found:.2f}, and the "
                f"run had {run:.2f}; load the weights before that step, and call the attention as the run does"
            )

    def _end(self, folder: RunFolder, layers: set[int], start: int, steps: int) -> Trained:
        """Check what the function has done, with the attentions of some layers, and return it."""
        told = f"--function {self.function}"
        if not folder.outcome.is_file():
            raise UserError(f"{told}: did not watch its loop; use the watch that it is handed")
        branch = Run.of_folder(folder)
        if LOSS.name not in branch.columns:
            raise UserError(f"{told}: a branch has no losses; hand them to watched.step")
        if branch.outcome.step != steps:
            raise UserError(f"{told}: trained {branch.outcome.step:,} steps where {steps:,} are asked for")
        if missing := set(range(1, self._n_layer + 1)) - layers:
            raise UserError(f"{told}: did not call attention({min(missing)}); give each layer its own, from 1")
        if W_Q_NORM.name not in branch.columns:
            raise UserError(
                f"{told}: no matrix was found that makes q of every layer; {log_of_branch(folder.path)} tells "
                "what was seen of their attention"
            )
        run_batches = batches_of(self.folder)
        for number, batch in batches_of(folder).items():
            if run_batches.get(start + number, batch) != batch:
                raise UserError(f"{told}: step {start + number:,} trains on another batch than the run did")
        onset = branch.onset
        norms = branch.measured_by_head(W_Q_NORM.name)[1][..., -1].tolist()
        return Trained(branch.outcome.outcome, None if onset is None else start + onset, norms)


class _Handed:
    """Returns the attention of a layer, from 1, with the signature of ``scaled_dot_product_attention``.

    Attributes:
        layers: whose attention has been called.
    """

    def __init__(self, mixture: Mixture, n_layer: int) -> None:
        self._mixture, self._n_layer = mixture, n_layer
        self.layers: set[int] = set()

    def __call__(self, layer: int) -> Callable[..., Tensor]:
        """Raises UserError where the run has no such layer."""
        if layer not in range(1, self._n_layer + 1):
            raise UserError(f"attention({layer!r}): the run has layers 1 to {self._n_layer}; give one of these")
        return partial(self._attend, layer)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if layer not in self.layers:  # changed by the first step alone, which runs uncompiled
            self.layers.add(layer)
        if attn_mask is not None or dropout_p:
            raise ValueError("a branch's attention takes no mask and no dropout")
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return mixed(q, k, v, is_causal, scale, place=LayerOf(self._mixture, layer))
