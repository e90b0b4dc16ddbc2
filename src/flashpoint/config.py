"""The typed configuration of a run: what Hydra composes, what the run folder stores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flashpoint.attention.named import resolved
from flashpoint.attention.variant import AttentionVariant
from flashpoint.errors import UserError
from flashpoint.typed import (
    check_literals,
    require_finite,
    require_not_negative,
    require_positive,
    structured_config,
)

HEAD_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """GPT-2's shape."""

    n_layer: int = 6
    n_head: int = 4
    d_model: int = 256
    context: int = 512
    """T: tokens per sequence, and the number of learned positions."""
    vocab_size: int = 8192

    @property
    def head_size(self) -> int:
        """d: features per head."""
        return self.d_model // self.n_head

    def __post_init__(self) -> None:
        require_positive(self, "model", ("n_layer", "n_head", "d_model", "context", "vocab_size"))
        if self.d_model % self.n_head or self.head_size not in HEAD_SIZES:
            raise ValueError(
                f"model.d_model={self.d_model} over model.n_head={self.n_head} gives heads of "
                f"{self.d_model / self.n_head:g} features; the attention has {', '.join(map(str, HEAD_SIZES))}"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    source: Literal["python_corpus", "openwebtext", "text"] = "python_corpus"
    path: str | None = None
    """For ``text``: a .txt, .jsonl or .parquet file, or a folder of them."""
    text_field: str = "text"
    """The field of a .jsonl record, or the column of a .parquet file, that holds the text."""
    tokenizer: Literal["bpe", "gpt2"] = "bpe"
    """``bpe`` is a byte-level BPE trained once on the corpus; ``gpt2`` is tiktoken's encoding."""
    vocab_size: int = 8192
    """Size of the trained BPE; ignored by ``gpt2`` (50,257)."""
    max_bytes: int | None = None
    """Bytes of text to take; None takes all."""
    val_fraction: float = 0.005
    """The tail of the token stream that is kept for validation."""
    workers: int | None = None
    """Tokenising processes; None is one per CPU core."""
    root: str = "data"
    """Folder of the prepared token files."""

    def __post_init__(self) -> None:
        check_literals(self, "data")
        if self.source == "text" and not self.path:
            raise ValueError("data.path is missing: data=text needs data.path=FILE_OR_FOLDER")
        if self.source != "text" and self.path:
            raise ValueError(f"data.path={self.path} is only read by data=text: add data=text")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction}: give a fraction between 0 and 1")
        if not 257 <= self.vocab_size <= 65536:
            raise ValueError(
                f"data.vocab_size={self.vocab_size}: give 257 (256 bytes and end-of-text) to 65,536 (uint16)"
            )
        for name in ("max_bytes", "workers"):
            if getattr(self, name) is not None:
                require_positive(self, "data", (name,))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation and its schedule."""

    steps: int = 20_000
    """Optimiser steps to run."""
    decay_steps: int | None = None
    """Steps over which the learning rate decays; None is ``steps``. A replay keeps the original's."""
    lr: float = 2e-3
    """Peak learning rate; 0 keeps the weights as they are, for what another attention makes of the same ones."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this share of the peak."""
    warmup_steps: int = 200
    batch_size: int = 64
    """Sequences per optimiser step, over all micro-batches."""
    micro_batch_size: int | None = None
    """Sequences per forward pass; None is ``batch_size``."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    log_interval: int = 10
    """Steps between reads of the losses from the device, and so the detector's latency."""
    checksum_interval: int = 100
    """Steps between checksums of weights and optimiser state in the digest chain; 0 turns them off."""
    eval_interval: int = 1000
    """Steps between validations; one more follows the last step."""
    eval_sequences: int = 256
    """Validation sequences, taken in order from the start of the validation tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    """CPU threads; None is one per core, and one with a GPU. Part of a CPU run's identity: sums depend on it."""
    compile: bool | None = None
    """torch.compile; None compiles on CUDA, where it pays, and not on a CPU, where it does not."""
    deterministic: bool = True
    """The same bits on every run; off only to measure what that costs."""
    cuda_graph: bool | None = None
    """Record a step once and repeat it as one launch; None does so on CUDA. Changes no bit."""

    @property
    def micro_batches(self) -> int:
        """Forward passes per optimiser step."""
        return self.batch_size // (self.micro_batch_size or self.batch_size)

    def __post_init__(self) -> None:
        check_literals(self, "train")
        require_positive(
            self,
            "train",
            ("steps", "batch_size", "log_interval", "eval_interval", "eval_sequences", "eps"),
        )
        for name in ("decay_steps", "micro_batch_size", "threads"):
            if getattr(self, name) is not None:
                require_positive(self, "train", (name,))
        require_not_negative(self, "train", ("lr", "warmup_steps", "weight_decay", "grad_clip", "checksum_interval"))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: give 0 or more and less than 1")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"train.min_lr_ratio={self.min_lr_ratio}: give a share between 0 and 1")
        if self.batch_size % (self.micro_batch_size or self.batch_size):
            raise ValueError(
                f"train.batch_size={self.batch_size} is no multiple of "
                f"train.micro_batch_size={self.micro_batch_size}: change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """When a run counts as exploded."""

    window: int = 100
    """Steps of the moving average of the loss."""
    margin: float = 0.3
    """Nats above its running minimum at which the moving average is out of bounds."""
    hold_steps: int = 50
    """Consecutive steps out of bounds that make an explosion; its onset is the first of them."""
    tail_steps: int = 500
    """Steps run on after the verdict, so that the explosion is on the record."""

    def __post_init__(self) -> None:
        require_positive(self, "detector", ("window", "margin", "hold_steps"))
        require_not_negative(self, "detector", ("tail_steps",))


Targets = Literal["data", "model", "unrounded"]


@dataclass(frozen=True, kw_only=True)
class ProbesConfig:
    """What is measured beside the loss."""

    weights_interval: int = 50
    """Steps between spectral norms of every head's W_Q, W_K, W_V and QKᵀ; 0 turns them off."""
    attention_interval: int = 200
    """Steps between observations of the attention on a few sequences of the step's batch; 0 turns them off."""
    sequences: int = 4
    """Sequences that are observed; of each head T² scores are held for them."""
    attention: tuple[str, ...] = ("delta_error", "ties", "scores", "out_bias", "null_direction", "similarity")
    """Probes of the attention (:mod:`flashpoint.probes.attention`), or FILE.py:CLASS for one of your own."""
    targets: Targets = "data"
    """What the observed sequences are to predict: the data; tokens drawn from the model's own prediction; or from that
    of the same weights with Ō and O unrounded (:mod:`flashpoint.probes.targets`)."""

    def __post_init__(self) -> None:
        check_literals(self, "probes")
        object.__setattr__(self, "attention", tuple(self.attention))
        require_positive(self, "probes", ("sequences",))
        require_not_negative(self, "probes", ("weights_interval", "attention_interval"))


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """The flight recorder."""

    interval: int = 500
    """Steps between checkpoints; 0 keeps none."""
    budget_gib: float = 4.0
    """Disk that a run's checkpoints may take, all together; old ones are thinned to keep it."""
    precursor_steps: int = 1000
    """When a run explodes, one checkpoint at least this long before the onset is kept for good, and one just before."""

    def __post_init__(self) -> None:
        require_not_negative(self, "checkpoints", ("interval", "precursor_steps"))
        require_positive(self, "checkpoints", ("budget_gib",))


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases. The local metrics file is always written."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """``auto`` is online with a stored login and offline without one; no mode ever prompts."""
    project: str = "flashpoint"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_literals(self, "tracking")
        object.__setattr__(self, "tags", tuple(self.tags))


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. ``configs/train.yaml`` composes it; ``config.yaml`` in the run folder stores it."""

    seed: int = 0
    """Seeds the initial weights, the batch order and stochastic rounding."""
    replay: str | None = None
    """Run whose batches and initial weights to repeat."""
    resume: str | None = None
    """Run to go on with."""
    from_step: int | None = None
    """Step of ``replay`` to start from."""
    allow_world_size_change: bool = False
    """Replay or resume with another number of processes than recorded: the same global batches, other bits."""
    runs_dir: str = "runs"
    run_name: str | None = None
    """Folder under ``runs_dir``; None is the time, the attention and the seed."""
    attn: AttentionVariant = field(default_factory=AttentionVariant)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        require_finite(self)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: give 0 to 2³² − 1")
        if self.from_step is not None and self.from_step < 0:
            raise ValueError(f"from_step={self.from_step}: give 0 or more")
        if self.run_name and Path(self.run_name).name != self.run_name:
            raise ValueError(f"run_name={self.run_name}: give a name without a folder; runs_dir is the folder")
        if self.data.tokenizer == "bpe" and self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is below data.vocab_size={self.data.vocab_size}: "
                "raise the first or lower the second"
            )
        self.attn.check_selection(self.model.n_layer, self.model.n_head)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: what the run folder stores."""
        return {**dataclasses.asdict(self), "attn": self.attn.to_dict()}


_SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "detector": DetectorConfig,
    "probes": ProbesConfig,
    "checkpoints": CheckpointsConfig,
    "tracking": TrackingConfig,
}


def hydra_schema() -> type:
    """``Config`` as a structured config: Hydra refuses unknown keys and wrong types by name."""
    return structured_config(Config)


def build_config(values: dict[str, Any], variants_dir: Path) -> Config:
    """Validate composed values.

    Args:
        values: plain containers, the shape of ``Config``; ``attn.elsewhere`` may be a variant's name.
        variants_dir: the ``attn`` group's folder, where such a name is looked up.

    Raises:
        UserError: naming the field and the remedy.
    """
    values = dict(values)
    elsewhere = values["attn"].get("elsewhere")
    if not isinstance(elsewhere, str | dict | None):
        raise UserError(f"attn.elsewhere={elsewhere}: no variant; give a name, e.g. attn.elsewhere=flash_fp32")
    try:
        values["attn"] = resolved(values["attn"], variants_dir)
        for name, section in _SECTIONS.items():
            values[name] = section(**values[name])
        return Config(**values)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
