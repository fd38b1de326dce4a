"""TextCNN with fewer products: each tap of a filter is applied once to every distinct word of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.encoders.textcnn import TextCNN


class FastTextCNN(TextCNN):
    """`TextCNN` with the same parameters and, up to rounding, the same output."""

    def encode_together(self, batches: tuple[tuple[Tensor, ...], ...]) -> bool:
        """Whether several batches may be encoded as one: no text depends on another, and on a CPU it is faster."""
        return not batches[0][0].is_cuda

    def forward(self, tokens: Tensor) -> Tensor:
        # Padding at the end lets a window start at every token, so that a text may be shorter than a window.
        if not tokens.is_cuda:
            tokens = tokens[:, : used_length(tokens)]
        tokens = F.pad(tokens, (0, self.widest - 1))
        words, word_index = distinct(tokens)
        embedded = self.embedding(words)
        is_token = tokens > 0
        pooled = self.pooled_over_all if tokens.is_cuda else self.pooled_over_best
        features = [pooled(c, embedded, word_index, is_token) for c in self.convolutions]  # type: ignore[arg-type]
        return torch.cat(features, 1)

    def windows_of(self, word_index: Tensor) -> int:
        """The number of windows in a padded text."""
        return word_index.shape[1] - self.widest + 1

    def pooled_over_all(self, conv: nn.Conv1d, embedded: Tensor, word_index: Tensor, is_token: Tensor) -> Tensor:
        """The largest response over the windows that hold a token, at least 0.

        A window's response is the sum of its taps' responses, so every tap is applied once to every distinct word and
        looked up from there. A response multiplied by 0 cannot be the largest, because ReLU follows.
        """
        (k,) = conv.kernel_size
        length = self.windows_of(word_index)
        taps = [F.linear(embedded, conv.weight[:, :, j]) for j in range(k)]
        responses = F.embedding(word_index[:, :length], taps[0])
        for j in range(1, k):
            words = word_index[:, j : j + length]
            responses = responses + F.embedding(words, taps[j])
        tokens = [is_token[:, j : j + length] for j in range(k)]
        valid = torch.stack(tokens).any(0)
        responses = (responses + conv.bias) * valid.unsqueeze(2)  # type: ignore[operator]
        return F.relu(responses.max(1).values)

    def pooled_over_best(self, conv: nn.Conv1d, embedded: Tensor, word_index: Tensor, is_token: Tensor) -> Tensor:
        """The same, faster on a CPU. Only the window with the largest response has a gradient: windows are searched
        without autograd, and the best one of each filter is computed again with it. A window of padding alone is
        replaced by the text's first window that holds a token.
        """
        (k,) = conv.kernel_size
        length = self.windows_of(word_index)
        tap_weights = conv.weight.permute(2, 0, 1).flatten(0, 1)
        taps = F.linear(embedded, tap_weights)
        taps = taps.view(-1, len(conv.weight))
        words = word_index.unfold(1, k, 1)[:, :length]
        windows = words * k + torch.arange(k)  # rows of `taps`, one for each tap
        valid = is_token.unfold(1, k, 1)[:, :length].any(2)
        texts = torch.arange(len(word_index))[:, None]
        first_valid = valid.byte().argmax(1, keepdim=True)
        replacement = windows[texts, first_valid]
        windows = torch.where(valid.unsqueeze(2), windows, replacement)
        sums = F.embedding_bag(windows.flatten(0, 1), taps.detach(), mode="sum")
        by_window = sums.view(len(word_index), length, -1)
        responses, best = largest(by_window)
        if taps.requires_grad:
            rows = windows[texts, best].movedim(2, 0)  # [taps, texts, filters]
            best_taps = taps.gather(0, rows.flatten(0, 1))
            responses = best_taps.view(rows.shape).sum(0)
        pooled = F.relu(responses + conv.bias)  # type: ignore[operator]
        return pooled * valid.any(1, keepdim=True)


def largest(responses: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum along the middle axis and its index, [texts, filters] each. Max-pooling runs along filters and is ten
    times as fast as torch.max."""
    images = responses.unsqueeze(2).permute(0, 3, 1, 2)  # channels last in memory, so no copy is made
    window = (responses.shape[1], 1)
    values, index = F.max_pool2d(images, window, return_indices=True)
    return values.flatten(1), index.flatten(1)


def used_length(tokens: Tensor) -> int:
    """The number of leading columns that hold a token of any text, at least one: the rest cannot change a result."""
    columns = (tokens > 0).any(0).nonzero()
    if len(columns) == 0:
        return 1
    return int(columns.max()) + 1


def distinct(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct words of a batch, and the index of each token's word among them. On a GPU shapes must not depend on
    values, so every token counts as distinct."""
    if tokens.is_cuda:
        index = torch.arange(tokens.numel(), device=tokens.device)
        return tokens.flatten(), index.view(tokens.shape)
    words, index = torch.unique(tokens, return_inverse=True)
    return words, index
