"""The protection of a run: what its settings, its method and its plan ask for, or why that is not possible."""

from __future__ import annotations

from typing import Any

from profcil.config import SITES
from profcil.data.bundle import Inputs
from profcil.engine.channel import When
from profcil.errors import ConfigError
from profcil.model.net import Net
from profcil.privacy.accountant import multiplier_of
from profcil.privacy.gradients import noise_for, steps_of_turn
from profcil.privacy.meter import planned_releases
from profcil.privacy.protection import Protection
from profcil.protocol.plan import Plan


def make_protection(config: Any, method: Any, plan: Plan, net: Net, like: Inputs) -> Protection | None:
    """The protection of a run; None without noise. Settings that cannot be protected are refused. `like` is an empty
    batch of inputs, for their shapes."""
    settings = config.privacy
    if settings.unit == "none":
        return None
    by_gradient = bool(settings.gradient_bound)
    exposed = untrainable(config, method, net) if by_gradient else method.exposed(settings.unit)
    if reason := exposed or unprotected_parts(config, method, net, like):
        raise ConfigError(f"privacy.unit = {settings.unit} is not possible: {reason}")
    by_client = settings.unit == "client"
    multiplier = settings.noise_multiplier
    releases = max(1.0, planned_for(config, method, plan))
    if not multiplier and by_gradient:
        multiplier = noise_for(settings, config.train, releases)
    if not multiplier:
        if by_client and config.dataset == SITES:
            raise ConfigError("sites do not know how often others take part; give privacy.noise_multiplier")
        multiplier = multiplier_of(settings.epsilon, settings.delta, releases)
    shared = by_client and not settings.secure_sum  # by as many clients as planned, else a sum or a reply has it all
    steps = steps_of_turn(settings, config.train) if by_gradient else 0
    return Protection(settings, multiplier, config.stream.participants if shared else 1, releases, steps)


def planned_for(config: Any, method: Any, plan: Plan) -> float:
    """The most releases that an example or a client takes part in. A site knows its own plan alone, and all sites must
    find the same number: there it is that of a client in all rounds."""
    by_client = config.privacy.unit == "client"
    rounds = config.train.rounds
    if config.dataset != SITES:
        return planned_releases(method, plan, rounds, config.warmup.rounds, by_client, config.privacy.secure_sum)
    each = [method.releases([When("round", p, r, rounds) for r in range(rounds)]) for p in range(plan.positions)]
    return float(config.warmup.rounds + sum(each) if by_client else max(each))


def untrainable(config: Any, method: Any, net: Net) -> str:
    """Why noise on gradients cannot hide single examples with this method and model; empty if it can."""
    name = type(method).__name__
    if not vars(type(method)).get("mean_of_examples"):  # not inherited: a subclass may do more
        return f"{name} does more than train on single examples; leave out privacy.gradient_bound, or choose fedavg"
    if net.facts.modality == "graph":
        return "the features of a node depend on other nodes, so it has no gradient of its own; choose probayes"
    if has_batch_norm(net):
        return "BatchNorm mixes examples, so they have no gradients of their own; set model.norm = group"
    if config.params.label_space == "local":
        return "which classes compete would reveal an example; set params.label_space = seen"
    if not config.train.batch:
        return "a step divides by train.batch, and 0, the number of examples, would reveal one; give train.batch"
    return ""


def has_batch_norm(net: Net) -> bool:
    """Whether the encoder has layers of BatchNorm."""
    return any(name.endswith("running_var") for name, _ in net.base.named_buffers())


def unprotected_parts(config: Any, method: Any, net: Net, like: Inputs) -> str:
    """What besides the method cannot be protected; empty if there is nothing."""
    if config.privacy.unit == "example" and config.warmup.rounds:
        return (
            "the warm-up sends model updates, which noise for single examples does not protect; set warmup.rounds = 0"
        )
    if config.privacy.unit == "client" and has_batch_norm(net):
        return "noise makes variances of BatchNorm negative; set model.norm = group"
    dictionary = method.dictionary(net, like)
    if dictionary and not getattr(dictionary, "usable_untrained", False):
        return (
            "the entries of this dictionary are words that clients count, and without counts it has none; set "
            "params.dictionary = 0, or for texts params.text_entries = hashes or contexts"
        )
    return ""
