"""Texts, encoded with tokenizers."""

from __future__ import annotations

import os

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from torch.utils.data import Dataset

TEXTS = [f"the {number} quick brown foxes jump over {number % 7} lazy dogs" for number in range(400)]


def write(folder):
    """A tokenizer, trained on the texts."""
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(TEXTS, WordLevelTrainer(special_tokens=["[UNK]"]))
    tokenizer.save(f"{folder}/tokenizer.json")


class Texts(Dataset):
    """The constructor encodes all texts, with threads, and a sample some of them again, in a fork without."""

    def __init__(self, source):
        self.tokenizer = Tokenizer.from_file(f"{source}/tokenizer.json")
        self.lengths = [len(text) for text in self.tokenizer.encode_batch(TEXTS)]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        encoded = self.tokenizer.encode_batch(TEXTS[index :: len(self)])
        return torch.tensor([text.ids for text in encoded]), self.lengths[index]


class TextsInThreads(Texts):
    """The library is told to use threads in a fork, too."""

    def __init__(self, source):
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        super().__init__(source)
