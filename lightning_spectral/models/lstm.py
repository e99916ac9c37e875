"""A recurrent text classifier."""

import torch
from torch import Tensor, nn

EXAMPLE_LENGTH = 500  # words, none of them padding; PriSM's code cuts or pads the reviews to this length


class LSTMClassifier(nn.Module):
    """Embedding, a two-layer LSTM, and a linear head on the state after the last word.

    PriSM's model for IMDB (its Table 6): 1000 words and padding, 64 features per word, 256 hidden units. With
    ``num_classes=1`` it has the table's 920,385 parameters; the default has 920,642.

    By our choice, this differs from PriSM's code as follows:

    - Two logits and a softmax instead of one logit and a sigmoid, so that one task head serves all models.
    - Padding follows the text, has embedding zero and is not read; PriSM's code puts it before the text and reads it
      like words.

    There is no dropout, as in PriSM's code.

    Args:
        vocab_size: Number of word ids, including padding.
        embedding_dim: Features per word.
        hidden_size: Hidden units of each layer.

    Shape:
        Input ``(batch, length)`` of word ids, each row padded with ``padding_idx`` at its end; output
        ``(batch, num_classes)``. A row of padding alone is read as one word of padding.

    Reference:
        Niu et al., "PriSM" (2023), Table 6, ``model/SentimentRNN.py`` and ``data/imdb.py``.

    Example:
        >>> model = LSTMClassifier(hidden_size=8)
        >>> short, filled = torch.tensor([[5, 9]]), torch.tensor([[5, 9, 0, 0]])
        >>> torch.allclose(model(short), model(filled))
        True
    """

    def __init__(
        self,
        num_classes: int = 2,
        vocab_size: int = 1001,
        embedding_dim: int = 64,
        hidden_size: int = 256,
        num_layers: int = 2,
        padding_idx: int = 0,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.words = nn.Embedding(vocab_size, embedding_dim, padding_idx)
        self.lstm = nn.LSTM(embedding_dim, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(hidden_size, num_classes)

    def example_input(self) -> Tensor:
        return torch.full((1, EXAMPLE_LENGTH), int(self.padding_idx == 0))

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.words(words))
        # The LSTM reads forwards, so the state after the last word does not depend on the padding after it.
        last = (words != self.padding_idx).sum(1).sub(1).clamp(min=0)
        logits: Tensor = self.head(states[torch.arange(len(words), device=words.device), last])
        return logits
