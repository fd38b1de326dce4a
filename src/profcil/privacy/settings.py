"""The settings of privacy: noise on replies, minimum support and secure sums."""

from __future__ import annotations

from dataclasses import dataclass

from profcil.config import Checked, setting
from profcil.errors import ConfigError


@dataclass(frozen=True)
class PrivacySettings(Checked):
    """What protects the examples behind the clients' replies. Runs without any of it do not store this section."""

    unit: str = setting(
        "none",
        "whose data the noise hides: that of one example from everybody, or all data of one client from everybody, "
        "without secure_sum from everybody but the server; none = no noise",
        choices=("none", "example", "client"),
    )
    epsilon: float = setting(0.0, "budget ε; the run stops before it would spend more; 0 = no budget", low=0.0)
    delta: float = setting(1e-5, "δ that ε is stated for", low=1e-12, high=0.5)
    noise_multiplier: float = setting(
        0.0,
        "noise of a reply, or of a secure sum, in units of what one example or client can change; 0 = such that the "
        "run ends at ε",
        low=0.0,
        high=1e9,
    )
    bound: float = setting(
        10.0,
        "Euclidean norm to which the features of an example are clipped; with base_rounds = 0 PRO-LIN gives each this "
        "norm",
        low=1e-6,
    )
    update_bound: float = setting(1.0, "unit client: norm to which a model update is clipped", low=1e-9)
    update_quantile: float = setting(
        0.0,
        "unit client: share of the model updates that should be within the bound, which then starts at update_bound "
        "and follows them; 0 = it is fixed",
        low=0.0,
        high=1.0,
    )
    gradient_bound: float = setting(
        0.0,
        "unit example: norm to which the gradient of each example is clipped in training, before noise; 0 = methods "
        "that train are refused",
        low=0.0,
        high=1e9,
    )
    sampling: float = setting(
        1.0,
        "unit example: the chance with which a training step takes an example; an epoch has 1/sampling steps, whose "
        "gradients are divided by train.batch",
        low=1e-4,
        high=1.0,
    )
    examples: int = setting(100, "unit client: the statistics of a client count for at most so many examples", low=1)
    min_support: int = setting(
        1, "a class with fewer examples than this, on a client or over all that report it, is left out", low=1
    )
    sum_support: bool = setting(
        False,
        "min_support holds for all clients of a secure sum together, by a secure sum of counts before it, not for each",
    )

    secure_sum: bool = setting(False, "the server gets the sum of the clients' replies, and no client's own")
    sum_clients: int = setting(3, "clients that a secure sum must have; a round with fewer is left out", low=2)
    sum_threshold: float = setting(
        0.6,
        "more than this share of a sum's clients must stay to the end; up to this share may collude with the server",
        low=0.5,
        high=1.0,
    )
    sum_bits: int = setting(28, "binary places of the fixed-point numbers of a secure sum", low=0, high=52)
    sum_range: float = setting(
        0.0,
        "largest size of a client's number in a secure sum, by which the bytes of a number are chosen; 0 = 8 bytes",
        low=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit != "none" and not (self.epsilon or self.noise_multiplier):
            raise ConfigError(
                f"privacy.unit = {self.unit!r} needs a budget or a noise multiplier; give privacy.epsilon or "
                "privacy.noise_multiplier"
            )
        if self.gradient_bound and self.unit != "example":
            raise ConfigError("privacy.gradient_bound is for privacy.unit = example; leave it out, or set the unit")
        if self.sampling != 1 and not self.gradient_bound:
            raise ConfigError(
                "privacy.sampling is for training with noise on gradients; leave it out, or give privacy.gradient_bound"
            )
        if self.gradient_bound and self.secure_sum:
            raise ConfigError(
                "with privacy.gradient_bound each client adds all of the noise to its own gradients, and a secure sum "
                "would not lessen it; leave out privacy.secure_sum"
            )
        if self.sum_support and not self.secure_sum:
            raise ConfigError(
                "privacy.sum_support counts over the clients of a secure sum; set privacy.secure_sum = true"
            )
        if self.update_quantile and self.unit != "client":
            raise ConfigError(
                "privacy.update_quantile is for model updates with privacy.unit = client; leave it out, or set the unit"
            )
