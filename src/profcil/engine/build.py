"""Builds the model of a run, checks the encoder of a plug-in, and separates validation examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from profcil import registry
from profcil.config import ModelSettings
from profcil.data.bundle import Bundle
from profcil.errors import ConfigError
from profcil.model.net import Net
from profcil.randomness import generator, torch_generator
from profcil.resolve import RunConfig

VALIDATION_SHARE = 0.1  # of each class, if a dataset has no validation part


def make_net(config: RunConfig, bundle: Bundle) -> Net:
    """The model of a run with its initial weights, which depend on the seed and the encoder alone."""
    return make_model(config.model, bundle, config.seed, config.train.augment)


def make_model(settings: ModelSettings, bundle: Bundle, seed: int, augment: bool = False) -> Net:
    """The model for data of these shapes. Of the bundle its facts, shapes and statistics are used, not its examples."""
    rng = torch_generator(seed, "model")
    name = settings.encoder or bundle.facts.encoder
    build = registry.find("encoders", name).build
    base = build_base(name, build, bundle, norm=settings.norm, width=settings.width, generator=rng)
    net = Net(
        base,
        bundle.facts,
        bottleneck=settings.bottleneck,
        head=settings.head,
        augment=augment,
        vocabulary=bundle.vocabulary,
        generator=rng,
    )
    return net.to(bundle.train.y.device)


def build_base(name: str, build: Callable[..., Any], bundle: Bundle, **given: Any) -> nn.Module:
    """The module that an encoder's `build` returns. Raises an error if it breaks the contract of encoders."""
    try:
        inspect.signature(build).bind(bundle, **given)
    except TypeError as error:
        wanted = 'build(bundle, *, generator, norm="batch", width=0)'
        raise ConfigError(f"the {name} encoder's build cannot be called ({error}); define it as {wanted}") from None
    global_state = torch.get_rng_state()
    base: nn.Module = build(bundle, **given)
    global_unused = torch.equal(global_state, torch.get_rng_state())
    if reason := encoder_fault(base, global_unused):
        raise ConfigError(f"the {name} encoder {reason}")
    return base


def encoder_fault(base: Any, own_generator: bool) -> str:
    """What is wrong with a base encoder, as the end of a sentence; empty if it is valid. `own_generator` says that its
    weights were not drawn from torch's global generator."""
    if not isinstance(base, nn.Module):
        return f"builds {type(base).__name__} where a torch module is expected"
    features = getattr(base, "features", None)
    if not isinstance(features, int) or features < 1:
        return f"has {features!r} as `features`; set it to the number of columns that forward returns"
    for name, tensor in base.state_dict().items():
        if not tensor.is_floating_point():
            return (
                f"has the state {name}, which cannot be averaged; use floating-point tensors only, and "
                "profcil.model.layers.BatchNorm instead of torch's"
            )
    if not own_generator:
        return (
            "draws its weights from torch's global generator; build it with profcil.model.layers.drawn(..., generator)"
        )
    return ""


def held_out(bundle: Bundle, config: RunConfig) -> Bundle:
    """The data with a validation part, if the run is evaluated on one or stops by one: the dataset's own, or a tenth of
    the training examples of each class."""
    is_needed = config.evaluate == "validation" or config.train.early_stop
    if not is_needed or bundle.validation is not None:
        return bundle
    y = bundle.train.y
    chosen = torch.zeros(len(y), dtype=torch.bool)
    for label in torch.unique(y).tolist():
        ids = torch.nonzero(y == label).flatten()
        order = torch.from_numpy(generator(config.seed, "validation", label).permutation(len(ids)))
        count = max(1, int(len(ids) * VALIDATION_SHARE))
        chosen[ids[order[:count]]] = True
    validation = bundle.train.part(torch.nonzero(chosen).flatten())
    train = bundle.train.part(torch.nonzero(~chosen).flatten())
    return replace(bundle, train=train, validation=validation)
