"""Encodings of the tensors of a block: float16, bfloat16, and int8 with one scale per class. The functions are pure.

An encoded tensor has its encoding in its name, so that a block says how it is read:

    mean:float16             float16
    mean:bfloat16            the upper 16 bits of float32, as int16
    mean:int8, mean:scale    int8 and float32; a value is their product

Only float32 tensors of more than one number are encoded; counts and ids stay. `int8` is for tensors with a row for each
class; others of the same block are float16. Every encoding is a projection: a decoded value is encoded without a
further error. So encoding again what was received gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.errors import Failure

LEVELS = 127  # of int8 on either side of zero
NARROWEST = 8  # numbers in a row of int8; below, the scale would take as much as it saves
MANTISSA = 11  # bits of a scale, so that 127 · scale is exact in float32
SMALLEST_SCALE = 2.0**-100
LARGEST_SCALE = 2.0**120  # 127 · scale is finite
SEPARATOR = ":"
ROUNDING = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 3e-2}  # relative error that sums may have after encoding
LARGEST = {"float32": math.inf, "float16": 65504.0, "bfloat16": math.inf, "int8": math.inf}  # finite value it can hold

Tensors = dict[str, Tensor]


def encoded(tensors: Mapping[str, Tensor], encoding: str, classes: int) -> Tensors:
    """The tensors as they are sent, of a block with rows for so many classes."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        found |= encoded_tensor(name, tensor, encoding_of(tensor, encoding, classes))
    return found


def encoding_of(tensor: Tensor, encoding: str, classes: int) -> str:
    """The encoding of one tensor."""
    if tensor.dtype != torch.float32 or tensor.numel() <= 1:
        return "float32"
    by_class = tensor.dim() == 2 and len(tensor) == classes and tensor.shape[1] >= NARROWEST
    return "float16" if encoding == "int8" and not by_class else encoding


def coded_name(name: str, encoding: str) -> str:
    return f"{name}{SEPARATOR}{encoding}"


def encoded_tensor(name: str, tensor: Tensor, encoding: str) -> Tensors:
    """The tensors that are sent for one."""
    coded = coded_name(name, encoding)
    if encoding == "float16":
        return {coded: to_float16(name, tensor)}
    if encoding == "bfloat16":
        return {coded: tensor.bfloat16().view(torch.int16)}
    if encoding == "int8":
        whole, scale = to_int8(tensor)
        return {coded: whole, coded_name(name, "scale"): scale}
    return {name: tensor}


def to_float16(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float16, whose range is small: a finite number beyond it is an error, and not infinity."""
    half = tensor.half()
    overflows = half.isinf() & tensor.isfinite()
    if bool(overflows.any()):
        largest = float(tensor[overflows].abs().max())
        raise Failure(f"tensor {name} has the value {largest:.3g}, which float16 cannot hold; choose bfloat16")
    return half


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale of each row: NaN if a value of the row is not finite."""
    scale = row_scale(rows.abs().amax(1))
    quotient = rows / scale[:, None]
    whole = quotient.nan_to_num(0.0).round().clamp(-LEVELS, LEVELS)
    return whole.to(torch.int8), scale


def row_scale(largest: Tensor) -> Tensor:
    """A row's largest value divided by 127, rounded up to a short mantissa. Then the largest value becomes ±127, all
    products are exact, and encoding them again finds the same scale."""
    mantissa, exponent = torch.frexp(largest.double() / LEVELS)
    steps = torch.ldexp(mantissa, torch.tensor(MANTISSA)).ceil()
    rounded = torch.ldexp(steps, exponent - MANTISSA)
    scale = rounded.clamp(SMALLEST_SCALE, LARGEST_SCALE).float()
    return torch.where(largest.isfinite(), scale, torch.nan)


def decoded(tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors as their receiver computes with them. A ValueError says that a tensor is not what its name says."""
    found: Tensors = {}
    for coded, tensor in tensors.items():
        name, _, encoding = coded.partition(SEPARATOR)
        scale = tensors.get(coded_name(name, "scale"))
        if encoding != "scale":
            found[name] = decoded_tensor(name, tensor, encoding, scale)
    return found


def decoded_tensor(name: str, tensor: Tensor, encoding: str, scale: Tensor | None) -> Tensor:
    """One tensor as its receiver computes with it."""
    if not encoding:
        return tensor
    if encoding == "float16" and tensor.dtype == torch.float16:
        return tensor.float()
    if encoding == "bfloat16" and tensor.dtype == torch.int16:
        return tensor.view(torch.bfloat16).float()
    is_rows = encoding == "int8" and tensor.dtype == torch.int8 and tensor.dim() == 2
    if not is_rows or scale is None or scale.dtype != torch.float32 or scale.shape != tensor.shape[:1]:
        raise ValueError(f"tensor {name} is not encoded as {encoding} is")
    return tensor.float() * scale[:, None]
