"""Tables: views, encoder and dictionary, in columns of any scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profcil.contract.stream import tables, texts
from profcil.data.bundle import Facts
from profcil.encoders import perceptron
from profcil.engine.dictionary import sent
from profcil.errors import ConfigError, DataError
from profcil.model import augmentations
from profcil.model.dictionary import make_dictionary
from profcil.model.dictionary.table import TableDictionary
from profcil.randomness import torch_generator

SCALES = torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0])
OFFSETS = torch.tensor([0.0, 5.0, -1e3, 1e4, 7.0])


def rows(n: int = 90) -> torch.Tensor:
    """Columns of very different scales; the deviation of the fourth is small beside its mean, the last is constant."""
    x = torch.randn(n, 5, generator=torch_generator(0, "rows")) * torch.tensor([1, 1, 1, 1, 0.0])
    return x * SCALES + OFFSETS


def found(dictionary: TableDictionary, clients) -> dict[str, torch.Tensor]:
    """The entries from what clients send, in the precision in which it is sent."""
    entries = dictionary.begin(torch.Generator())
    for round in range(dictionary.rounds):
        sums = [sent(dictionary.sums(entries, (x,), round)) for x in clients]
        total = {name: sum(part[name].double() for part in sums) for name in sums[0]}
        entries = dictionary.update(entries, total, round)
    return entries


# -- dictionary -------------------------------------------------------------------------------------------------------


def test_the_entries_of_clients_are_those_of_all_rows_together():
    x = rows()
    dictionary = TableDictionary(30, 5)
    entries = found(dictionary, x.split([7, 50, 1, 32]))
    wide = x.double().numpy()
    assert np.allclose(entries["mean"], wide.mean(0), rtol=1e-5)
    assert np.allclose(entries["std"][:4], wide.std(0)[:4], rtol=1e-3) and entries["std"][4] == 1
    central = dictionary.features(found(dictionary, [x]), (x,))
    assert torch.allclose(dictionary.features(entries, (x,)), central, atol=1e-2)


def test_the_features_are_standardised_columns_and_rectified_projections():
    x = rows()
    dictionary = TableDictionary(40, 5)
    features = dictionary.features(found(dictionary, [x]), (x,))
    assert features.shape == (90, 40) and (features[:, 5:] >= 0).all() and (features[:, 5:] == 0).any()
    assert torch.allclose(features[:, :4].mean(0), torch.zeros(4), atol=1e-2)
    assert torch.allclose(features[:, :4].std(0, correction=0), torch.ones(4), atol=1e-2)
    assert TableDictionary(3, 5).features(found(dictionary, [x]), (x,)).shape == (90, 3)


def test_the_features_do_not_depend_on_the_scale_of_columns():
    x = torch.randn(50, 5, generator=torch_generator(0, "x"))
    dictionary = TableDictionary(20, 5)
    scaled = x * torch.tensor([1e-2, 1, 10, 100, 3]) + 2
    one, two = (dictionary.features(found(dictionary, [t]), (t,)) for t in (x, scaled))
    assert torch.allclose(one, two, atol=1e-3)


def test_a_far_value_is_cut():
    x = rows()
    dictionary = TableDictionary(5, 5)
    entries = found(dictionary, [x])
    x[0, 1] = 1e9
    assert dictionary.features(entries, (x,)).abs().max() <= 10


def test_statistics_of_fewer_rows_than_the_support_are_not_kept():
    entries = found(TableDictionary(10, 5, min_support=91), [rows()])
    assert not entries["mean"].any() and (entries["std"] == 1).all()


def test_it_is_the_dictionary_of_tables():
    facts = Facts("t", "T", "table", 2, None, None)
    assert isinstance(make_dictionary(facts, (torch.zeros(0, 5),), 0, 12, 1), TableDictionary)


# -- views ------------------------------------------------------------------------------------------------------------


def view(*names: str, strong: bool = True):
    facts = Facts("t", "T", "table", 2, None, None, views=names)
    function = augmentations.strong if strong else augmentations.weak
    return function(facts, (rows(400),), torch_generator(0, "view"))


def test_a_strong_view_keeps_the_rows_and_adds_noise_and_a_mask():
    x, noise, kept = view("noise", "mask")
    assert torch.equal(x, rows(400)) and noise.shape == kept.shape == x.shape
    assert float(noise.std()) == pytest.approx(augmentations.NOISE, rel=0.1)
    assert float(kept.float().mean()) == pytest.approx(1 - augmentations.CELLS, abs=0.03)


def test_views_that_the_data_does_not_list_are_not_applied():
    assert view("noise")[2].all() and not view("mask")[1].any()
    (x,) = view("noise", "mask", strong=False)
    assert torch.equal(x, rows(400))


# -- encoder ----------------------------------------------------------------------------------------------------------


def encoder(norm: str = "none", **more):
    return perceptron.build(tables(), generator=torch_generator(0, "net"), norm=norm, **more)


def test_the_encoder_standardises_by_the_training_part():
    bundle = tables()
    standardised = encoder().columns(bundle.train.x)
    assert torch.allclose(standardised.mean(0), torch.zeros(10), atol=1e-4)
    assert torch.allclose(standardised.std(0, correction=0), torch.ones(10), atol=1e-4)
    assert not {"columns.mean", "columns.std"} & encoder().state_dict().keys()


def test_the_encoder_applies_noise_and_mask_to_standardised_values():
    net = encoder()
    x = tables().train.x[:6]
    noise = torch.randn(x.shape, generator=torch_generator(0, "noise"))
    kept = torch.arange(10) % 2 == 0
    inputs = []
    net.first.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    net(x, noise, kept.expand(6, -1))
    assert torch.equal(inputs[0], (net.columns(x) + noise) * kept)
    assert not inputs[0][:, ~kept].any()


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_the_encoder_has_the_width_that_was_set(norm):
    net = encoder(norm, width=24)
    assert net.features == 24 and net(tables().train.x).shape == (80, 24)
    assert torch.isfinite(net(tables().train.x[:1])).all()


def test_the_encoder_refuses_other_inputs():
    bundle = tables()
    with pytest.raises(DataError, match="0 means and 0 deviations for 10 columns"):
        perceptron.build(type(bundle)(bundle.facts, bundle.train, bundle.test, None, ()), generator=torch.Generator())
    with pytest.raises(ConfigError, match="needs rows of numbers"):
        perceptron.build(texts(), generator=torch.Generator())
