"""Models for text: a character language model of GPT-2 blocks, and a recurrent classifier."""

import torch
from torch import Tensor, nn

from lightning_spectral.models.attention import SelfAttention


class GPT2Block(nn.Module):
    """Attention and an MLP of four times the width, each after a LayerNorm and with a residual connection.

    Input and output have shape ``(batch, length, width)``.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, dropout=dropout, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        wide = self.gelu(self.expand(self.norm2(x)))
        branch: Tensor = self.dropout(self.contract(wide))
        return x + branch


class CharTransformer(nn.Module):
    """Predicts the next character: embeddings, GPT-2 blocks, a LayerNorm and a linear head.

    Korzhenkov & Louizos (2024) train "a tiny transformer model with three GPT-2 blocks" on Shakespeare. The default has
    628,352 parameters.

    Details that the paper leaves open:

    - Vocabulary of 90 and context of 80 characters: as in the TensorFlow Federated data set, which has the paper's
      715 clients.
    - Width 128 and four heads: as in minGPT's "gpt-micro". The recurrent net of Reddi et al. (2021) for the same
      data is of similar size, with 820,522 parameters.
    - Dropout 0.1 for embeddings, attention and branches: as in GPT (Radford et al. 2018, section 4.1).
    - The head is not tied to the embedding, unlike in GPT-2: our choice. Last layers stay dense, and a separate head
      needs no rule for how to treat a shared weight.
    - Queries, keys and values are separate layers; see `SelfAttention`.

    Initial weights are those of GPT-2: normal with standard deviation 0.02 (positions: 0.01), biases zero, and the
    last layer of each of the ``2 num_layers`` branches divided by the square root of the number of branches.

    Args:
        vocab_size: Number of distinct characters.
        context_length: Longest sequence.
        width: Size of each position's vector; ``num_heads`` must divide it.

    Shape:
        Input ``(batch, length)`` of character ids, ``length <= context_length``; output
        ``(batch, length, vocab_size)``, at each position the logits of the next character.

    Reference:
        Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.3;
        code in ``openai/gpt-2``.
        Korzhenkov & Louizos (2024), section 4.1.

    Example:
        >>> model = CharTransformer(vocab_size=12, width=16)
        >>> model(torch.tensor([[3, 1, 4, 1, 5]])).shape
        torch.Size([1, 5, 12])
    """

    def __init__(
        self,
        vocab_size: int = 90,
        context_length: int = 80,
        width: int = 128,
        num_heads: int = 4,
        num_layers: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.characters = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GPT2Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=0.01)
        branches = [
            layer
            for block in self.modules()
            if isinstance(block, GPT2Block)
            for layer in (block.attention.out, block.contract)
        ]
        for layer in branches:
            nn.init.normal_(layer.weight, std=0.02 / len(branches) ** 0.5)

    def example_input(self) -> Tensor:
        return torch.zeros(1, self.context_length, dtype=torch.long)

    def forward(self, characters: Tensor) -> Tensor:
        length = characters.shape[1]
        if length > self.context_length:
            raise ValueError(
                f"A sequence must not be longer than `context_length`={self.context_length}, got {length}; "
                "cut it or raise `context_length`."
            )
        positions = torch.arange(length, device=characters.device)
        x = self.blocks(self.dropout(self.characters(characters) + self.positions(positions)))
        logits: Tensor = self.head(self.norm(x))
        return logits


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
