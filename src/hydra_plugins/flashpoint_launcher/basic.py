"""``hydra/launcher=basic``, the default: the runs of a sweep one after the other, in this process.

No postponed annotations here, as in ``gpus.py``.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus

from flashpoint.errors import UserError, notify, one_line

from ._sweep import own_of

_TOLD = 8  # names of runs in one line


@dataclass
class BasicLauncherConfig:
    """No settings."""

    _target_: str = "hydra_plugins.flashpoint_launcher.basic.BasicLauncher"


# In place of Hydra's own of that name: Hydra loads its plugins before those of others.
ConfigStore.instance().store(group="hydra/launcher", name="basic", node=BasicLauncherConfig, provider="flashpoint")


class BasicLauncher(basic_launcher.BasicLauncher):
    """Hydra's own, which would tell of the first failed run only, and not before the last has ended."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all.

        Raises:
            UserError: some failed, each of which was told when it did.
        """
        returns: list[JobReturn] = []
        errors: list[Exception] = []
        every_own = own_of(job_overrides)
        for number, own in enumerate(every_own):
            try:
                (result,) = super().launch([job_overrides[number]], initial_job_idx + number)
            except SystemExit:  # a signal stopped the run
                _tell_of_those_not_begun([" ".join(one) for one in every_own[number + 1 :]])
                raise
            returns.append(result)
            if result.status == JobStatus.FAILED:
                error = result._return_value  # the property would raise it
                errors.append(error)
                if not isinstance(error, UserError):
                    traceback.print_exception(error)
                notify(f"failed: {' '.join(own or job_overrides[number])}: {one_line(error)}")
                _let_go(error)
        if errors:
            raise UserError(f"{len(errors)} of {len(returns)} runs failed") from errors[0]
        return returns


def _tell_of_those_not_begun(names: Sequence[str]) -> None:
    if names:
        more = ", …" if len(names) > _TOLD else ""
        told = f"not begun: {len(names)} of the sweep's runs ({', '.join(names[:_TOLD])}{more})"
        notify(f"{told}; a sweep with hydra/launcher=gpus goes on where it was stopped")


def _let_go(error: BaseException | None) -> None:
    """Clear what the frames of an error hold: a failed run's model would stay until the sweep ends."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error that is raised from itself is its own cause
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
