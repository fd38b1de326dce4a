"""TextCNN (Kim, 2014): embedding, convolutions of several widths, max-pooling over time. The base encoder for text.

Widths 1 to 3 are for characters and short sentences; the original paper has (3, 4, 5).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.model.layers import drawn, expect, sample, unused

EMBEDDING = 128
WIDTHS = (1, 2, 3)


class TextCNN(nn.Module):
    def __init__(self, vocabulary: int, filters: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(EMBEDDING, filters, k) for k in widths)
        self.widths = widths
        self.widest = max(widths)
        self.features = filters * len(widths)

    def forward(self, tokens: Tensor) -> Tensor:
        """The largest response of each filter, at least 0. Windows of padding alone do not count, and a text without
        tokens gives 0."""
        length = tokens.shape[1]
        tokens = F.pad(tokens, (0, self.widest - 1))  # a text may be shorter than the widest window
        is_token = tokens > 0
        embedded = self.embedding(tokens).transpose(1, 2)
        pooled = []
        for width, conv in zip(self.widths, self.convolutions, strict=True):
            windows = is_token.unfold(1, width, 1)[:, :length]
            is_real = windows.any(2)
            responses = F.relu(conv(embedded)[:, :, :length])
            responses = responses * is_real.unsqueeze(1)
            pooled.append(responses.max(2).values)
        return torch.cat(pooled, 1)


def build(
    bundle: Bundle,
    *,
    generator: torch.Generator,
    norm: str = "batch",
    width: int = 0,
    widths: tuple[int, ...] = WIDTHS,
) -> TextCNN:
    """Builds the encoder. `width` is the number of filters of each of the `widths`; 0 means 128, for 384 features."""
    unused("textcnn", norm)
    has_tokens = bundle.vocabulary > 0 and sample(bundle)[0].dim() == 2
    expect(has_tokens, "textcnn", "token ids", bundle)
    model = drawn(lambda: TextCNN(bundle.vocabulary, width or 128, widths), generator)
    nn.init.normal_(model.embedding.weight, generator=generator)
    with torch.no_grad():
        model.embedding.weight[0] = 0  # of the padding id, which gets no gradient
    return model
