"""TextCNN (Kim, 2014): embedding, convolutions of several widths, max-pooling over time. The base encoder for text.

Widths 1 to 3 suit characters and short sentences; (3, 4, 5) are the widths of the original.
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
    joins = True  # several batches may be encoded as one: no text depends on another

    def __init__(self, vocabulary: int, filters: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(EMBEDDING, filters, k) for k in widths)
        self.widest = max(widths)
        self.features = filters * len(widths)

    def forward(self, tokens: Tensor) -> Tensor:
        # Padding at the end lets a window start at every token, so that a text may be shorter than a window.
        tokens = F.pad(tokens if tokens.is_cuda else tokens[:, : used(tokens)], (0, self.widest - 1))
        words, place = distinct(tokens)
        embedded, real = self.embedding(words), tokens > 0
        pooled = self.everywhere if tokens.is_cuda else self.winners
        return torch.cat([pooled(c, embedded, place, real) for c in self.convolutions], 1)  # type: ignore[arg-type]

    def everywhere(self, conv: nn.Conv1d, embedded: Tensor, place: Tensor, real: Tensor) -> Tensor:
        """The largest response over the windows that hold a real token, at least 0; an empty text gives 0.

        A window's response is the sum of what each tap of the filter makes of the word under it, so every tap is
        applied once to every distinct word of the batch and looked up from there: a fraction of a convolution's
        products. A response multiplied by 0 cannot win, because ReLU follows.
        """
        (k,), length = conv.kernel_size, place.shape[1] - self.widest + 1
        taps = [F.linear(embedded, conv.weight[:, :, j]) for j in range(k)]
        responses = F.embedding(place[:, :length], taps[0])
        for j in range(1, k):
            responses = responses + F.embedding(place[:, j : j + length], taps[j])
        valid = torch.stack([real[:, j : j + length] for j in range(k)]).any(0)
        responses = (responses + conv.bias) * valid.unsqueeze(2)  # type: ignore[operator]
        return F.relu(responses.max(1).values)

    def winners(self, conv: nn.Conv1d, embedded: Tensor, place: Tensor, real: Tensor) -> Tensor:
        """The same, faster on a CPU: only the window that wins has a gradient, so the windows are searched without one,
        and then each filter's winner is looked up again. Windows of padding alone stand for the text's first real one.
        """
        (k,), length = conv.kernel_size, place.shape[1] - self.widest + 1
        taps = F.linear(embedded, conv.weight.permute(2, 0, 1).flatten(0, 1)).view(-1, len(conv.weight))
        windows = place.unfold(1, k, 1)[:, :length] * k + torch.arange(k)  # rows of `taps`, one for each tap
        valid = real.unfold(1, k, 1)[:, :length].any(2)
        texts, first = torch.arange(len(place))[:, None], valid.byte().argmax(1, keepdim=True)
        windows = torch.where(valid.unsqueeze(2), windows, windows[texts, first])
        found = F.embedding_bag(windows.flatten(0, 1), taps.detach(), mode="sum")
        responses, best = largest(found.view(len(place), length, -1))
        if taps.requires_grad:
            rows = windows[texts, best].movedim(2, 0)  # [taps, texts, filters]
            responses = taps.gather(0, rows.flatten(0, 1)).view(rows.shape).sum(0)
        return F.relu(responses + conv.bias) * valid.any(1, keepdim=True)  # type: ignore[operator]


def largest(responses: Tensor) -> tuple[Tensor, Tensor]:
    """The largest along the middle axis and where it is, [texts, filters] each; as a pooling, whose kernel runs along
    filters and is ten times as fast as torch.max."""
    images = responses.unsqueeze(2).permute(0, 3, 1, 2)  # channels last in memory, as it lies
    values, places = F.max_pool2d(images, (responses.shape[1], 1), return_indices=True)
    return values.flatten(1), places.flatten(1)


def used(tokens: Tensor) -> int:
    """How many columns hold a token of any text, at least one: the rest cannot change a result."""
    columns = (tokens > 0).any(0).nonzero()
    return int(columns.max()) + 1 if len(columns) else 1


def distinct(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The different words of a batch, and where each token's word is among them. On a GPU, where shapes should not
    depend on values and products are cheap, every token stands for itself."""
    if tokens.is_cuda:
        return tokens.flatten(), torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    words, place = torch.unique(tokens, return_inverse=True)
    return words, place


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
