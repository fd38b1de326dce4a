"""The settings of PRO-LIN."""

from __future__ import annotations

from dataclasses import dataclass

from profcil.config import Checked, setting
from profcil.errors import ConfigError
from profcil.methods.parts import mean_uncertainty
from profcil.model.dictionary import TEXT_ENTRIES

WIDEST = 20_000  # features of a dictionary: their second moments take 3.2 GB


@dataclass(frozen=True)
class ProLinParams(Checked):
    """Settings of PRO-LIN."""

    dictionary: int = setting(0, "fixed features of the inputs; 0 = no dictionary", low=0, high=WIDEST)
    text_entries: str = setting(
        "ngrams",
        "entries of a dictionary of texts: frequent words and pairs, projections of words and contexts, or hashed "
        "words and pairs, which no data has influenced",
        choices=TEXT_ENTRIES,
    )
    base_rounds: int = setting(
        -1, "rounds of a position in which the base moves; -1 = all, 0 = none: closed forms only", low=-1
    )
    keep_scores: float = setting(2.0, "weight of keeping the starting base's scores of other classes", low=0.0)
    proximal: float = setting(0.01, "λ of the proximal term towards the broadcast base", low=0.0)
    scale: float = setting(0.2, "factor on the logits of the head that a position trains against", low=0.0)
    shrink: float = setting(0.3, "λ of the head that a position trains against, in units of the mean variance", low=0.0)
    shrink_deployed: float = setting(0.05, "λ of the deployed head, in units of the mean variance", low=0.0)
    inertia: float = setting(
        0.0, "weight of an example of earlier positions, relative to one of this, in the base; 0 = off", low=0.0
    )
    transport: str = setting(
        "linear", "how old memory follows the base: by a linear map, or not at all", choices=("linear", "none")
    )
    ridge: float = setting(0.01, "regularisation of the linear map, as a share of its diagonal", low=0.0)
    moments: str = setting(
        "full",
        "second moments of features: their whole matrix, a sketch of it (fewer numbers in secure sums and on the "
        "server), or none (nearest class mean, for noise); the last two need base_rounds = 0",
        choices=("full", "sketch", "none"),
    )
    sketch_rank: int = setting(32, "directions of a sketch; it has this many numbers for each feature, and one", low=1)
    uncertainty: str = setting("off", mean_uncertainty.HELP, choices=mean_uncertainty.CHOICES)
    anchor: bool = setting(
        True,
        "whether memory and deployed head also use the features of the warmed-up base; false with base_rounds = 0: the "
        "dictionary alone",
    )
    min_support: int = setting(1, "older name of privacy.min_support; the larger of the two counts", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.anchor or self.base_rounds or self.dictionary):
            raise ConfigError(
                "anchor = false with base_rounds = 0 leaves the dictionary alone, which has no features here; set "
                "dictionary to their number, or anchor = true"
            )
        if self.moments != "full" and self.base_rounds:
            raise ConfigError(
                f'moments = "{self.moments}" cannot follow a base that moves; set base_rounds = 0 or moments = "full"'
            )
        if self.moments != "full" and self.uncertainty != "off":
            raise ConfigError(
                f'uncertainty = "{self.uncertainty}" shrinks by the whole matrix of second moments, which moments = '
                f'"{self.moments}" does not have; set uncertainty = "off" or moments = "full"'
            )

    @property
    def rank(self) -> int | None:
        """The directions of a sketch; 0 = no second moments, None = their whole matrix."""
        return {"full": None, "none": 0}.get(self.moments, self.sketch_rank)
