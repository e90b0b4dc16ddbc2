"""The typed configuration of a run: what Hydra composes, what the run folder stores.

A key's default, constraint and description stand with its field, and nowhere else; so do two marks, by which replays
and statistics know it: :data:`EXPERIMENT` and :class:`FromTape` of :mod:`flashpoint.schema`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import field
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, InstanceOf, model_validator
from pydantic.dataclasses import dataclass

from flashpoint.detector import DetectorConfig
from flashpoint.lab.precision import Precision
from flashpoint.numerics.variant import AttentionVariant, check_in_model
from flashpoint.schema import CHECKED, EXPERIMENT, Count, CountOrNone, Folder, FromTape, Share
from flashpoint.typed import require_numbers_of_the_device
from flashpoint_kernels.codes import HEAD_SIZES

_BATCHES, _WEIGHTS = FromTape("the batches come from the tape"), FromTape("the initial weights come from the tape")
GPT2_VOCABULARY = 50_257
"""Tokens of GPT-2's encoding."""
BUILT_IN_PROBES = (
    "delta_error", "ties", "scores", "rows", "deviation", "out_bias", "null_direction", "similarity"
)  # fmt: skip
"""The probes of :mod:`flashpoint.lab.probes.runner`, named here: a wrong one is told before PyTorch is there."""
SIMILARITY_TOKENS = 256
"""Of an observation, between which the probe ``similarity`` compares; a checkpoint holds their directions."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ModelConfig:
    """A model's family and shape. The defaults are those of ``model=ignite``."""

    family: Annotated[Literal["gpt2", "llama"], EXPERIMENT] = "gpt2"
    """``gpt2`` has LayerNorm, GELU and learned positions; ``llama`` has RMSNorm, SwiGLU and rotary positions."""
    n_layer: Annotated[Count, EXPERIMENT] = 6
    """Layers."""
    n_head: Annotated[Count, EXPERIMENT] = 4
    """Heads of a layer."""
    n_kv_head: Annotated[Count | None, EXPERIMENT] = None
    """Heads of keys and values, each of which serves as many heads of queries; null is ``n_head``."""
    d_model: Annotated[Count, EXPERIMENT] = 256
    """Features of a token: the model's width."""
    qk_norm: Annotated[bool, EXPERIMENT] = False
    """Divide q and k of each head by their root mean square, before their positions, and multiply by learned gains."""
    score_cap: Annotated[float | None, Field(gt=0), EXPERIMENT] = None
    """c of c·tanh(S/c) in the place of the scores S, nats, as in Gemma 2. It takes attn=flex, which is its control."""
    shift_keys: Annotated[Literal["none", "running"], EXPERIMENT] = "none"
    """``running``: K less a running mean of each head, as a bias of W_K's product: nothing passes over K."""
    context: Annotated[Count, EXPERIMENT] = 2048
    """T: tokens of a sequence, and the number of positions."""
    vocab_size: Annotated[Count, EXPERIMENT] = 8192
    """Tokens of the vocabulary."""
    init_seed: Annotated[int | None, Field(ge=0, lt=2**32), EXPERIMENT] = None
    """Seeds the initial weights alone; null takes ``seed``."""
    init_ulps: Annotated[int, Field(ge=0, le=2**30), EXPERIMENT] = 0
    """FP32 ulps by which one initial weight, the first of W_Q in layer 1, is larger: 65,536 are one ulp of BF16."""

    @property
    def head_size(self) -> int:
        """d: features per head."""
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def d_mlp(self) -> int:
        """Features inside the MLP."""
        return d_mlp(self.family, self.d_model)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.d_model % self.n_head or self.head_size not in HEAD_SIZES:
            raise ValueError(
                f"model.d_model={self.d_model} over model.n_head={self.n_head} gives heads of "
                f"{Fraction(self.d_model, self.n_head)} features; the attention has {', '.join(map(str, HEAD_SIZES))}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: change one")
        seeing = {"family=llama": self.family == "llama", "qk_norm": self.qk_norm, "score_cap": self.score_cap}
        if self.shift_keys != "none" and (first := next((name for name, has in seeing.items() if has), None)):
            raise ValueError(
                f"model.shift_keys={self.shift_keys}: softmax sees a bias of keys before model.{first}; choose one"
            )
        return self


def d_mlp(family: str, d_model: int) -> int:
    """Return the features inside an MLP, between projections of so many: in all about 8 d_model² weights.

    Llama has a multiple of 256; in small models that would be up to half more.
    """
    return math.ceil(8 * d_model / (3 * 64)) * 64 if family == "llama" else 4 * d_model


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DataConfig:
    """Where the tokens come from."""

    source: Literal["packages", "prose", "python_corpus", "openwebtext", "text"] = "packages"
    """Where the text is from."""
    path: str | None = None
    """For ``text``: a .txt, .jsonl or .parquet file, or a folder of them."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """The field of a .jsonl record, or the column of a .parquet file, that holds the text."""
    tokenizer: Literal["bpe", "gpt2"] = "bpe"
    """``bpe`` is a byte-level BPE trained once on the corpus; ``gpt2`` is tiktoken's encoding."""
    vocab_size: Annotated[int, Field(ge=257, le=65536)] = 8192
    """Size of the trained BPE; ignored by ``gpt2`` (50,257)."""
    max_bytes: Count | None = None
    """Bytes of text to take; null takes all."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.005
    """The tail of the token stream that is kept for validation."""
    workers: Count | None = None
    """Tokenising processes; null is one per CPU core."""
    root: Folder = "data"
    """Folder of the prepared token files."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source == "text" and not self.path:
            raise ValueError("data.path is missing: data=text needs data.path=FILE_OR_FOLDER")
        if self.source != "text" and self.path:
            raise ValueError(f"data.path={self.path} is only read by data=text: add data=text")
        return self


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TrainConfig:
    """Optimisation and its schedule."""

    steps: Count = 20_000
    """Optimiser steps to run."""
    decay_steps: Annotated[Count | None, EXPERIMENT] = None
    """Steps over which the learning rate decays; null is ``steps``. A replay keeps the original's."""
    lr: Annotated[float, Field(ge=0), EXPERIMENT] = 2e-3
    """Peak learning rate; 0 keeps the weights as they are, for what another attention makes of the same ones."""
    min_lr_ratio: Annotated[Share, EXPERIMENT] = 0.1
    """The cosine ends at this share of the peak."""
    warmup_steps: Annotated[CountOrNone, EXPERIMENT] = 200
    """Steps over which the learning rate rises."""
    batch_size: Annotated[Count, EXPERIMENT, _BATCHES] = 64
    """Sequences per optimiser step, over all micro-batches."""
    micro_batch_size: Annotated[Count | None, _BATCHES] = None
    """Sequences per forward pass; null is ``batch_size``."""
    beta1: Annotated[float, Field(ge=0, lt=1), EXPERIMENT] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1), EXPERIMENT] = 0.95
    """AdamW's decay of the second moment."""
    eps: Annotated[float, Field(gt=0), EXPERIMENT] = 1e-8
    """AdamW's ε."""
    weight_decay: Annotated[float, Field(ge=0), EXPERIMENT] = 0.0
    """Decoupled decay of matrices: a step shrinks them by this times the learning rate."""
    grad_clip: Annotated[float, Field(ge=0), EXPERIMENT] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    z_loss: Annotated[float, Field(ge=0), EXPERIMENT] = 0.0
    """Coefficient of the mean of logsumexp(logits)², whose gradient joins that of the loss (arXiv 2204.02311: 1e-4).
    No loss that is logged holds it."""
    log_interval: Count = 10
    """Steps between reads of the losses from the device, and so the detector's latency."""
    checksum_interval: CountOrNone = 100
    """Steps between checksums of weights and optimiser state in the digest chain; 0 turns them off."""
    precision: Annotated[Precision, EXPERIMENT] = "bf16"
    """What matrix products take and return; all but ``bf16`` need attn=sdpa. ``fp16`` scales the loss by 2¹²."""
    order_seed: Annotated[int | None, Field(ge=0, lt=2**32), EXPERIMENT, _BATCHES] = None
    """Seeds the batch order alone; null takes ``seed``."""
    eval_interval: Count = 1000
    """Steps between validations; one more follows the last step."""
    eval_sequences: Count = 256
    """Validation sequences, taken in order from the start of the validation tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run computes; ``auto`` is the GPU where there is one."""
    threads: Count | None = None
    """CPU threads; null is one per core, and one with a GPU. Part of a CPU run's identity: sums depend on it."""
    compile: bool | None = None
    """torch.compile; null compiles on CUDA, where it pays, and not on a CPU, where it does not."""
    deterministic: bool = True
    """The same bits on every run; off only to measure what that costs."""
    cuda_graph: bool | None = None
    """Launch a step as one CUDA graph; null does so on CUDA. Changes no bit."""

    @property
    def sequences(self) -> int:
        """Sequences per forward pass of a process."""
        return self.micro_batch_size or self.batch_size

    @property
    def micro_batches(self) -> int:
        """Forward passes per optimiser step, over all processes."""
        return self.batch_size // self.sequences

    def compiles(self, device: str) -> bool:
        """Whether the model is compiled on ``cpu`` or ``cuda``."""
        return device == "cuda" if self.compile is None else self.compile

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.sequences:
            raise ValueError(
                f"train.batch_size={self.batch_size} is no multiple of "
                f"train.micro_batch_size={self.micro_batch_size}: change one of them"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class OptimizerConfig:
    """What updates the weights. AdamW's settings, also beside Muon, are keys of ``train``."""

    name: Annotated[Literal["adamw", "muon"], EXPERIMENT] = "adamw"
    """``muon`` updates the matrices of the layers by Muon, and the embeddings and gains by AdamW."""
    momentum: Annotated[float, Field(ge=0, lt=1), EXPERIMENT] = 0.95
    """Muon's decay of its one moment, with Nesterov's look ahead."""
    eps: Annotated[float, Field(gt=0, le=1), EXPERIMENT] = 1e-7
    """Muon's ε: the least norm that a matrix is divided by before it is made orthogonal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("momentum", "eps"):
            value = getattr(self, name)
            if self.name != "muon" and value != getattr(type(self), name):
                raise ValueError(f"optimizer.{name}={value} is only read by optimizer=muon: add optimizer=muon")
        return self


Targets = Literal["data", "model", "unrounded"]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ProbesConfig:
    """What is measured beside the loss."""

    weights_interval: CountOrNone = 50
    """Steps between spectral norms of every head's W_Q, W_K, W_V and QKᵀ; 0 turns them off."""
    attention_interval: CountOrNone = 200
    """Steps between observations of the attention on a few sequences of the step's batch; 0 turns them off."""
    sequences: Count = 4
    """Sequences that are observed; of each head T² scores are held for them."""
    attention: tuple[str, ...] = ("delta_error", "ties", "scores", "out_bias", "null_direction", "similarity")
    """Probes of the attention (:mod:`flashpoint.lab.probes.attention`), or FILE.py:CLASS for one of your own."""
    strict: bool = False
    """Stop the run, to be resumed, where a probe of your own fails; otherwise the run goes on without the probe."""
    weights_against: str | None = None
    """Run from whose weights these are measured, at each of its snapshots (``checkpoints.weights_interval``)."""
    targets: Targets = "data"
    """What the observed sequences are to predict: the data; tokens drawn from the model's own prediction; or from that
    of the same weights with Ō and O unrounded (:mod:`flashpoint.lab.probes.targets`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.attention:
            if self.attention.count(name) > 1:
                raise ValueError(f"probes.attention: {name} is there more than once; name each probe once")
            if name not in BUILT_IN_PROBES and ":" not in name:
                known = ", ".join(BUILT_IN_PROBES)
                raise ValueError(f"probes.attention: no probe named {name}; choose of {known}, or FILE.py:CLASS")
        return self


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CheckpointsConfig:
    """Full states on the disk, to go on from and to branch off."""

    interval: CountOrNone = 500
    """Steps between checkpoints; 0 keeps none."""
    weights_interval: CountOrNone = 0
    """Steps between snapshots of the weights alone, all of which are kept; 0 keeps none."""
    budget_gib: Annotated[float, Field(gt=0)] = 4.0
    """Disk that a run's checkpoints may take, all together; old ones are thinned to keep it."""
    precursor_steps: CountOrNone = 1000
    """When a run explodes, one checkpoint at least this long before the onset is kept for good, and one just before."""


WandbName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
"""What W&B takes as a name."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TrackingConfig:
    """Weights & Biases. The local metrics file is always written."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """``offline`` logs to the run's folder and ``online`` uploads, if there is a login; no mode ever prompts."""
    project: WandbName = "flashpoint"
    """W&B's project."""
    entity: WandbName | None = None
    """W&B's user or team; null is the login's."""
    group: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """W&B's group of the runs of one sweep; null takes the sweep's name."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """The hardware is added."""
    paths: bool = False
    """Hand W&B paths of this machine, its name and the command line, too."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Config:
    """One run. ``configs/train.yaml`` composes it; ``config.json`` in the run folder stores it."""

    seed: Annotated[int, Field(ge=0, lt=2**32), _WEIGHTS] = 0
    """Seeds the initial weights, the batch order and stochastic rounding."""
    replay: str | None = None
    """Run whose batches and initial weights to repeat."""
    resume: str | None = None
    """Run to go on with."""
    from_step: CountOrNone | None = None
    """Step of ``replay`` to start from."""
    allow_world_size_change: bool = False
    """Replay or resume with another number of processes than recorded: the same global batches, other bits."""
    trust: bool = False
    """Run code, and upload to W&B, as the records of ``replay`` or ``resume`` or YAML files of your own say."""
    runs_dir: Folder = "runs"
    """Where run folders are made."""
    run_name: str | None = None
    """Folder under ``runs_dir``; null is the time, the attention and the seed."""
    attn: InstanceOf[AttentionVariant] = field(default_factory=AttentionVariant)
    model: Annotated[InstanceOf[ModelConfig], _WEIGHTS] = field(default_factory=ModelConfig)
    data: Annotated[InstanceOf[DataConfig], _BATCHES] = field(default_factory=DataConfig)
    train: InstanceOf[TrainConfig] = field(default_factory=TrainConfig)
    optimizer: InstanceOf[OptimizerConfig] = field(default_factory=OptimizerConfig)
    detector: InstanceOf[DetectorConfig] = field(default_factory=DetectorConfig)
    probes: InstanceOf[ProbesConfig] = field(default_factory=ProbesConfig)
    checkpoints: InstanceOf[CheckpointsConfig] = field(default_factory=CheckpointsConfig)
    tracking: InstanceOf[TrackingConfig] = field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_numbers_of_the_device(self)
        if self.from_step is not None and self.replay is None:
            raise ValueError(f"from_step={self.from_step} needs replay=RUN: the run to start from")
        if not re.fullmatch(r"[\w.+-][^/\\]{0,199}", self.attn.name):
            raise ValueError(f"attn.name={self.attn.name[:40]}: give a name of 1 to 200 characters without / and \\")
        if self.train.steps * self.train.batch_size * self.model.context >= 2**63:
            raise ValueError(
                "train.steps × train.batch_size × model.context: more tokens than 64 bits count; lower one"
            )
        if self.data.tokenizer == "gpt2" and self.model.vocab_size < GPT2_VOCABULARY:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is below GPT-2's {GPT2_VOCABULARY:,} tokens: "
                f"give model.vocab_size={GPT2_VOCABULARY}, or data.tokenizer=bpe"
            )
        if self.data.tokenizer == "bpe" and self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is below data.vocab_size={self.data.vocab_size}: "
                "raise the first or lower the second"
            )
        if self.optimizer.name == "muon" and self.train.lr > 1e30:
            raise ValueError(f"train.lr={self.train.lr} times a matrix's size leaves FP32 in Muon: give 1e30 or less")
        check_in_model(self.attn, self.model.n_layer, self.model.n_head)
        if (cap := self.model.score_cap) is not None:
            if not all(one.takes_score_cap for one in (self.attn, *filter(None, [self.attn.elsewhere]))):
                raise ValueError(f"model.score_cap={cap:g}: attn={self.attn.name} takes no cap; choose attn=flex")
            if self.probes.attention and self.probes.attention_interval:
                raise ValueError(
                    f"model.score_cap={cap:g}: the probes of the attention know no cap; add probes.attention_interval=0"
                )
        if self.train.z_loss and self.probes.targets != "data":
            raise ValueError(
                f"train.z_loss={self.train.z_loss:g}: its gradient at drawn targets has no mean of zero, which "
                f"probes.targets={self.probes.targets} is for; set probes.targets=data"
            )
        if self.train.precision != "bf16" and (self.attn.runs_kernels_of_ours or self.attn.elsewhere is not None):
            raise ValueError(
                f"train.precision={self.train.precision}: attn={self.attn.name} rounds to BF16; choose attn=sdpa"
            )
        return self

    @property
    def own_code(self) -> tuple[str, ...]:
        """The probes that are files, FILE.py:CLASS each."""
        return tuple(word for word in self.probes.attention if word not in BUILT_IN_PROBES)

    @property
    def to_go_on(self) -> str:
        """What ``resume`` of the run needs besides to do as this one does; begins with a space where it is any."""
        return " trust=true" if self.own_code or self.tracking.wandb == "online" else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values only: what the run folder stores."""
        return {**dataclasses.asdict(self), "attn": self.attn.to_dict()}


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class HardwareConfig:
    """Where a run is to compute. No part of the run: its manifest has what it ran on."""

    gpu: str | None = None
    """Words of the GPU's name, such as ``H200``; null takes any device."""
    gres: str | None = None
    """What ``hydra/launcher=slurm`` asks for, such as ``gpu:h200:1``; null is a GPU of any kind."""
    partition: str | None = None
    """SLURM's partition; null is ``hydra.launcher.partition``."""
    constraint: str | None = None
    """SLURM's constraint; null is ``hydra.launcher.constraint``."""


def sets_hardware(override: str) -> bool:
    """Whether an override of Hydra's is of :class:`HardwareConfig`, as ``hardware=h200`` and ``++hardware.gpu=null``
    are."""
    return override.lstrip("+~").startswith(("hardware=", "hardware."))
