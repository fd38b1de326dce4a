"""Writers of tiny datasets in the official formats."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest


def cifar_binary(folder: Path, train: int = 6, test: int = 4, classes: int = 3) -> None:
    folder.mkdir(parents=True)
    for name, n in (("train", train), ("test", test)):
        records = np.zeros((n, 3074), dtype=np.uint8)
        records[:, 0] = 19
        records[:, 1] = np.arange(n) % classes
        records[:, 2:] = np.arange(n)[:, None] + np.repeat([0, 50, 100], 1024)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def cifar_python(folder: Path, train: int = 6, test: int = 4, classes: int = 3) -> None:
    folder.mkdir(parents=True)
    for name, n in (("train", train), ("test", test)):
        data = (np.arange(n)[:, None] + np.repeat([0, 50, 100], 1024)).astype(np.uint8)
        labels = [i % classes for i in range(n)]
        (folder / name).write_bytes(pickle.dumps({"data": data, "fine_labels": labels}, protocol=2))
    names = [f"fish {i}" for i in range(classes)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, protocol=2))


def tiny_imagenet(folder: Path, wnids: tuple[str, ...] = ("n02", "n01"), each: int = 2) -> None:
    from PIL import Image

    (folder / "val/images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, carp\nn02\tcat\n")
    for k, wnid in enumerate(wnids):
        (folder / f"train/{wnid}/images").mkdir(parents=True)
        for i in range(each):
            level = 100 * k + 20
            grey = Image.new("L", (64, 64), level)
            image = grey if i == 0 else Image.new("RGB", (64, 64), (level,) * 3)
            image.save(folder / f"train/{wnid}/images/{wnid}_{i}.JPEG", "JPEG")
        Image.new("RGB", (64, 64), (200, 0, 0)).save(folder / f"val/images/val_{k}.JPEG", "JPEG")
    lines = [f"val_{k}.JPEG\t{wnid}\t0\t0\t9\t9" for k, wnid in enumerate(wnids)] + ["val_9.JPEG\tn01\t0\t0\t9\t9"]
    (folder / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")


def thucnews(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "class.txt").write_text("finance\nsports", "utf-8")
    (folder / "train.txt").write_text("股市股票\t0\n球赛\t1\n" + "股" * 40 + "\t0\n", "utf-8")
    (folder / "dev.txt").write_text("股票\t0\n", "utf-8")
    (folder / "test.txt").write_text("球新\t1\n\t0\n", "utf-8")


def clinc(folder: Path) -> None:
    folder.mkdir(parents=True)
    content = {
        "train": [["What's my Balance?", "balance"], ["play a song", "music"], ["play, play", "music"]],
        "val": [["balance", "balance"]],
        "test": [["sing a song", "music"]],
        "oos_train": [["how tall is it", "oos"]],
    }
    (folder / "data_full.json").write_text(json.dumps(content))


class Csr:
    """A CSR matrix with the attributes that old versions of scipy pickled."""

    def __init__(self, dense: np.ndarray) -> None:
        rows, self.indices = np.nonzero(dense)
        self.data = dense[rows, self.indices]
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
        self._shape = dense.shape


def dump_as_scipy(obj: object) -> bytes:
    """Pickle with `Csr` under the name scipy.sparse.csr.csr_matrix, as in the official files."""
    module = types.ModuleType("scipy.sparse.csr")
    module.csr_matrix = Csr  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scipy.sparse.csr", module)
        names = Csr.__module__, Csr.__qualname__
        Csr.__module__ = "scipy.sparse.csr"
        Csr.__qualname__ = "csr_matrix"
        try:
            return pickle.dumps(obj, protocol=2)
        finally:
            Csr.__module__, Csr.__qualname__ = names


def cora(folder: Path, nodes: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Twenty nodes of two classes in a ring. The last four are listed out of order, as in the official files."""
    folder.mkdir(parents=True)
    labels = np.arange(nodes) % 2
    x = np.zeros((nodes, 5), dtype=np.float32)
    x[np.arange(nodes), np.arange(nodes) % 4] = x[:, 4] = 1
    onehot = np.eye(2, dtype=np.int32)[labels]
    order = [18, 16, 19, 17]
    graph = {i: [(i + 1) % nodes, (i + 1) % nodes, i] for i in range(nodes)}  # a double edge and a self-loop each
    parts = {"x": Csr(x[:2]), "y": onehot[:2], "allx": Csr(x[:16]), "ally": onehot[:16]}
    parts |= {"tx": Csr(x[order]), "ty": onehot[order], "graph": graph}
    for end, part in parts.items():
        (folder / f"ind.cora.{end}").write_bytes(dump_as_scipy(part))
    (folder / "ind.cora.test.index").write_text("\n".join(map(str, order)) + "\n")
    return x, labels


def coauthor(path: Path, nodes: int = 20) -> None:
    path.parent.mkdir(parents=True)
    eye = Csr(np.roll(np.eye(nodes, dtype=np.float32), 1, axis=1))
    attr = Csr(np.arange(nodes * 3, dtype=np.float32).reshape(nodes, 3))
    fields = {"adj": eye, "attr": attr}
    arrays = {f"{k}_{f}": getattr(v, f) for k, v in fields.items() for f in ("data", "indices", "indptr")}
    shapes = {f"{k}_shape": np.array(v._shape) for k, v in fields.items()}
    names = np.array(
        [{"an": "object"}], dtype=object
    )  # the official file has pickled members, which the loader ignores
    np.savez(path, labels=np.arange(nodes) % 3, attr_names=names, **arrays, **shapes)


def arxiv(folder: Path) -> None:
    (folder / "raw").mkdir(parents=True)
    (folder / "split/time").mkdir(parents=True)
    tables = {
        "raw/node-feat": "0.5,-0.25\n1,2\n3,4\n5,6\n",
        "raw/edge": "0,1\n1,0\n2,3\n2,2\n",
        "raw/node-label": "0\n1\n1\n0\n",
        "raw/num-node-list": "4\n",
        "raw/num-edge-list": "4\n",
        "split/time/train": "0\n1\n",
        "split/time/valid": "2\n",
        "split/time/test": "3\n",
    }
    for name, text in tables.items():
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
