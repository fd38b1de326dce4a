"""TextCNN (Kim, 2014): embedding, convolutions of several widths, max-pooling over time. The base encoder for text.

Widths 1 to 3 suit characters and short sentences; (3, 4, 5) are the widths of the original.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.encoders.norms import drawn, expect, sample, unused

EMBEDDING = 128
WIDTHS = (1, 2, 3)


class TextCNN(nn.Module):
    def __init__(self, vocabulary: int, filters: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(EMBEDDING, filters, k) for k in widths)
        self.widest = max(widths)
        self.features = filters * len(widths)

    def forward(self, tokens: Tensor) -> Tensor:
        # Padding at the end lets a window start at every token, so that a text may be shorter than a window.
        tokens = F.pad(tokens, (0, self.widest - 1))
        embedded, real = self.embedding(tokens), (tokens > 0).float()
        return torch.cat([self.pooled(c, embedded, real) for c in self.convolutions], 1)  # type: ignore[arg-type]

    def pooled(self, conv: nn.Conv1d, embedded: Tensor, real: Tensor) -> Tensor:
        """The largest response over the windows that hold a real token, at least 0; an empty text gives 0.

        The convolution is one matrix product over windows laid side by side, which is faster on a CPU than conv1d;
        a response multiplied by 0 cannot win, because ReLU follows.
        """
        (k,) = conv.kernel_size
        length = embedded.shape[1] - self.widest + 1
        windows = torch.cat([embedded[:, j : j + length] for j in range(k)], 2)
        valid = torch.stack([real[:, j : j + length] for j in range(k)]).amax(0)
        responses = F.linear(windows, conv.weight.transpose(1, 2).flatten(1), conv.bias)
        return F.relu((responses * valid.unsqueeze(2)).amax(1))


def build(
    bundle: Bundle,
    *,
    generator: torch.Generator,
    norm: str = "batch",
    width: int = 0,
    widths: tuple[int, ...] = WIDTHS,
) -> TextCNN:
    """`width` is the number of filters of each of the `widths`; 0 means 128, which gives 384 features."""
    unused("textcnn", norm)
    expect(bundle.vocabulary > 0 and sample(bundle)[0].dim() == 2, "textcnn", "token ids", bundle)
    model = drawn(lambda: TextCNN(bundle.vocabulary, width or 128, widths), generator)
    nn.init.normal_(model.embedding.weight, generator=generator)
    with torch.no_grad():
        model.embedding.weight[0] = 0  # padding means nothing, and gets no gradient
    return model
