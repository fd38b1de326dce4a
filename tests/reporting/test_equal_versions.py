"""Which versions compute the same results, and that an entry is made where a golden digest changes."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import pytest

from profcil.runs.results.equal_versions import first_equal_version

DIGESTS = Path(__file__).parents[1] / "golden" / "digests.json"
EXACT = ("weights", "scores", "ledger")
# Of the golden digests of each method. They have been the same since the version that `equal_versions` gives.
SEEN = {
    "fedavg": "2307666b2f02ad6e",
    "fedcbdr": "c0ce31bd4ec4da6a",
    "fedproto": "5d277c2b2eb78602",
    "fedprox": "e5129119a6168a7e",
    "fedseit": "5d0d701b58ab89c2",
    "fedspace": "d19ea2b61f67370d",
    "fedssi": "c5580f9c57480390",
    "hr": "d17345942e2bb7df",
    "mfcl": "cf9f9eefe0574e8c",
    "motion": "bebd833df884185e",
    "power": "f648de85456623e8",
    "pro": "a60b079b233ddfb5",
    "probayes": "6354eaa989231bae",
    "prolin": "85dcdc22c520f4a5",
    "promax": "e65836dacdbf00df",
    "target": "6af8b4c72ee22143",
}


@pytest.mark.parametrize(
    "method, settings, version, first",
    [
        ("fedavg", "", "0.9.0", "0.3.0"),
        ("fedavg", "train.lr=0.1", "0.10.0", "0.3.0"),
        ("fedavg", "", "0.3.0", "0.3.0"),
        ("fedavg", "", "0.2.0", "0.2.0"),
        ("fedseit", "", "0.6.0", "0.3.0"),
        ("fedseit", "", "0.7.0", "0.7.0"),
        ("fedseit", "", "0.10.0", "0.7.0"),
        ("prolin", "privacy.epsilon=8 privacy.unit=example", "0.8.0", "0.8.0"),
    ],
)
def test_the_first_version_with_the_same_results(method: str, settings: str, version: str, first: str) -> None:
    assert first_equal_version(method, settings, version) == first


def digests_by_method() -> dict[str, str]:
    """A digest of the golden digests of each method: of weights, scores and bytes of all its runs."""
    parts = defaultdict(list)
    for path, by_key in json.loads(DIGESTS.read_text()).items():
        for key, runs in by_key.items():
            for name, found in runs.items():
                method = name.split("/")[1].split("-")[0]
                parts[method].append([path, key, name, *(found[kind] for kind in EXACT)])
    return {
        method: hashlib.blake2b(json.dumps(sorted(rows)).encode(), digest_size=8).hexdigest()
        for method, rows in sorted(parts.items())
    }


def test_golden_digests_do_not_change_unnoticed() -> None:
    found = digests_by_method()
    changed = {method: digest for method, digest in found.items() if SEEN.get(method) != digest}
    advice = "if their results changed, enter the version in equal_versions.CHANGED; then enter here"
    assert not changed, f"golden digests of {', '.join(changed)} changed or were added; {advice} {changed}"
