"""The settings of PRO: the values of the paper, its open points, its ablations, and options beyond it."""

from __future__ import annotations

from dataclasses import dataclass

from profcil.config import Checked, setting
from profcil.errors import ConfigError
from profcil.methods.parts import mean_uncertainty

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class ProParams(Checked):
    """Settings of PRO. The defaults are the paper's values, where it gives one. `fit_when_frozen` and `refresh_at` were
    chosen on validation seeds (docs/experiments.md); the paper's text says `true` and `"final"`. It leaves `fit_space`
    open. Nothing is replayed while a client fits, so remembered classes in that loss would only be pushed down."""

    base_rounds: int = setting(2, "rounds at the start of each position in which the base encoder moves", low=0)
    fit_when_frozen: bool = setting(False, "fit adapter and head on current features alone in frozen rounds too")
    auxiliary: float = setting(0.05, "weight of the contrastive regulariser while the base moves", low=0.0)
    temperature: float = setting(0.5, "temperature of the contrastive regulariser", low=1e-3)
    proximal: float = setting(0.01, "λ of the proximal term towards the broadcast model during fitting", low=0.0)
    old_memory: str = setting(
        "base",
        "where old classes are rehearsed: before the adapter, after it (head only), or nowhere",
        choices=("base", "adapted", "none"),
    )
    quota: int = setting(20, "features per class, client and local epoch in the balanced set", low=1)
    noise: float = setting(0.1, "γ: scale of the spread in pseudo-features", low=0.0)
    covariance: str = setting(
        "diagonal",
        "spread of pseudo-features: per class and coordinate, or (beyond the paper) one matrix that all classes share",
        choices=("diagonal", "shared"),
    )
    fit_space: str = setting(
        "own",
        "classes the loss of Eq. (sup) competes over: the client's own, those and the remembered ones, or all of Y^(p)",
        choices=("own", "remembered", "seen"),
    )
    rehearse_space: str = setting(
        "remembered",
        "classes the loss of Eq. (pro-loss) competes over: the client's own and remembered ones, or all of Y^(p)",
        choices=("remembered", "seen"),
    )
    fit_lr: float = setting(
        0.0, "learning rate of Eq. (plastic); 0 = train.lr, the paper's one rate for everything", low=0.0
    )
    rehearse_lr: float = setting(
        0.0, "learning rate of Eq. (pro-loss); 0 = train.lr, the paper's one rate for everything", low=0.0
    )
    fit_epochs: int = setting(
        0, "local epochs of fitting, which the paper calls short and gives no number; 0 = train.epochs", low=0
    )
    rehearse_epochs: int = setting(
        0, "local epochs of rehearsal; 0 = train.epochs, the local epochs of the protocol table", low=0
    )
    fit_schedule: str = setting(
        "constant",
        "learning rate of fitting over a position's rounds; the paper calls its rate initial and gives no schedule",
        choices=SCHEDULES,
    )
    rehearse_schedule: str = setting(
        "constant", "learning rate of rehearsal over a position's rounds", choices=SCHEDULES
    )
    batch_statistics: str = setting(
        "averaged",
        "BatchNorm statistics that a client sends after fitting: its own, averaged by Eq. (fedavg), or those of the "
        "broadcast model",
        choices=("averaged", "broadcast"),
    )
    refresh: str = setting(
        "global",
        "model under which statistics are measured: the aggregated or the local one",
        choices=("global", "local"),
    )
    refresh_at: str = setting(
        "both",
        "when memory is refreshed: after the last round, when the base is frozen, or both",
        choices=("final", "freeze", "both"),
    )
    merge: str = setting(
        "replace",
        "statistics of a class that returns: replaced, as in Eq. (global-memory-refresh), or pooled by counts",
        choices=("counts", "replace"),
    )
    adapted_bank: bool = setting(False, "also store the auxiliary adapted-space memory M^z")
    keep_scores: float = setting(
        0.0,
        "beyond the paper: weight of keeping the scores of remembered classes as they were at the start of a position, "
        "while the base moves",
        low=0.0,
    )
    keep_temperature: float = setting(1.0, "temperature of the soft-max over kept scores", low=1e-3)
    closed_head: bool = setting(
        False,
        "beyond the paper: predict by a linear discriminant head from the means and the shared covariance; needs "
        'covariance = "shared"',
    )
    shrink: float = setting(0.05, "λ of that head, in units of the mean variance", low=0.0)
    uncertainty: str = setting("off", mean_uncertainty.HELP, choices=mean_uncertainty.CHOICES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.closed_head and (self.covariance != "shared" or self.old_memory == "none"):
            raise ConfigError(
                'closed_head = true needs remembered means and a shared covariance; set covariance = "shared" and '
                'old_memory = "base"'
            )
        if self.uncertainty == "shrink" and self.old_memory != "base":
            raise ConfigError(
                f'uncertainty = "shrink" is of base features, and old_memory = "{self.old_memory}" rehearses none; '
                'set old_memory = "base" or uncertainty = "off"'
            )
        if self.covariance == "shared" and self.old_memory == "adapted":
            raise ConfigError(
                'covariance = "shared" is a covariance of base features, but old_memory = "adapted" rehearses adapted '
                'ones; set old_memory = "base" or covariance = "diagonal"'
            )
